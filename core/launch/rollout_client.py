"""The rollout actor as the training loop calls it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from core.launch.cluster import Cluster
from core.launch.rollout_actor import RolloutActor

if TYPE_CHECKING:
    from core.data.rollout_batch import RolloutBatch
    from core.launch.generators import GeneratorPool

logger = logging.getLogger(__name__)


class RolloutClient:
    """The rollout actor (data set, producer, buffer, rewards) as the loop sees it."""

    def __init__(self, cluster: Cluster, generators: GeneratorPool, settings: Mapping[str, object]):
        self._cluster = cluster
        self._actor = cluster.start_actor(RolloutActor, "rollout", generators.actors, dict(settings))
        self._starting = self._actor.start.remote()
        self._announced: list[Any] = []

    def wait_started(self, timeout_seconds: float) -> dict[str, Any]:
        """Facts about the data set: num_prompts, mean_prompt_tokens."""
        return self._cluster.gather_started([self._starting], names=["rollout"], timeout_seconds=timeout_seconds)[0]

    def _call(self, method: str, *args: object) -> Any:
        return self._wait(method, *args, timeout_seconds=self._cluster.deadlines.call_seconds, key="call_seconds")

    def _sampling(self, method: str, *args: object, meanwhile: Callable[[], None]) -> Any:
        """A call that waits for generators."""
        limit = self._cluster.deadlines.batch_seconds
        return self._wait(method, *args, timeout_seconds=limit, key="batch_seconds", meanwhile=meanwhile)

    def _wait(self, method: str, *args: object, timeout_seconds: float, key: str, **options: Any) -> Any:
        calls = [*self._announced, getattr(self._actor, method).remote(*args)]
        self._announced = []
        return self._cluster.waiter.gather(
            calls,
            names=["rollout"] * len(calls),
            phase=method,
            timeout_seconds=timeout_seconds,
            key=f"deadlines.{key}",
            **options,
        )[-1]

    def take(self, version: int, meanwhile: Callable[[], None]) -> tuple[RolloutBatch, dict[str, float]]:
        """The next batch, oldest first, and the producer's figures; waits until the staleness bound can be kept, and
        calls `meanwhile` about once a second."""
        return self._sampling("take", version, meanwhile=meanwhile)

    def begin(self, version: int, state: object | None, *, ignore_changes: bool) -> None:
        """Start sampling, from the beginning or from a recover checkpoint's state."""
        self._call("begin", version, state, ignore_changes)

    def set_version(self, version: int) -> None:
        """The generators now sample with this version: admit what it allows. The next call waits for it, and has its
        error: the trainer need not."""
        self._announced.append(self._actor.set_version.remote(version))

    def state_dict(self) -> object:
        return self._call("state_dict")

    def evaluate(self, meanwhile: Callable[[], None]) -> dict[str, float]:
        """Accuracy and completion length over the evaluation set. `meanwhile`: see take()."""
        return self._sampling("evaluate", meanwhile=meanwhile)

    def lost_generators(self) -> dict[int, str]:
        """Those that the rollout side has given up, by index, with the reason."""
        return self._call("lost_generators")

    def replace_generator(self, index: int, actor: Any) -> None:
        """Requests may go to this one from now on, in place of one that is dead."""
        self._call("replace_generator", index, actor)

    def close(self) -> None:
        self._call("close")
