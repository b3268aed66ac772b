"""The rollout actor as the training loop calls it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import ray

from core.launch.cluster import Cluster
from core.launch.rollout_actor import RolloutActor

if TYPE_CHECKING:
    from ray import ObjectRef

    from core.data.stored_batch import Ref, StoredBatch, StoredFields
    from core.launch.generators import GeneratorPool
    from core.monitoring.samples import Sample
    from core.rollout_settings import DataFacts, RolloutSettings
    from core.step_batch import BatchFacts, BatchRequest, Scored, Scoring

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
Method = Callable[Concatenate[RolloutActor, P], Coroutine[Any, Any, R]]
"""A method of the actor. Calls name it as RolloutActor.take, so that arguments and results are checked."""


class RolloutClient:
    """The rollout actor (data set, producer, experience, rewards) as the loop sees it."""

    actor_class: type[RolloutActor] = RolloutActor
    """What runs in the process."""

    def __init__(self, cluster: Cluster, generators: GeneratorPool, settings: RolloutSettings):
        self._cluster = cluster
        self._actor = cluster.start_actor(ray.remote(self.actor_class), "rollout", generators.actors, settings)
        self._starting = self._send(RolloutActor.start)
        self._announced: list[Any] = []
        self._taking: Sequence[Any] = ()

    def _send(self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> Any:
        """Start a call and return its handle."""
        return getattr(self._actor, method.__name__).remote(*args, **kwargs)

    def _send_pair(self, method: Method[P, tuple[R, S]], *args: P.args, **kwargs: P.kwargs) -> Sequence[Any]:
        """Start a call and return a handle of each of its two results: one that the ranks get, and one to read here."""
        return getattr(self._actor, method.__name__).options(num_returns=2).remote(*args, **kwargs)

    def _call(self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._wait_call(self._send(method, *args, **kwargs), method.__name__)
        return result

    def _wait_call(self, call: Any, phase: str) -> Any:
        return self._wait(call, phase, timeout_seconds=self._cluster.deadlines.call_seconds, key="call_seconds")

    def _sampling(self, method: Method[P, R], meanwhile: Callable[[], None], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method that waits for generators."""
        result: R = self._wait_sampling(self._send(method, *args, **kwargs), method.__name__, meanwhile)
        return result

    def _wait_sampling(self, call: Any, phase: str, meanwhile: Callable[[], None]) -> Any:
        limit = self._cluster.deadlines.batch_seconds
        return self._wait(call, phase, timeout_seconds=limit, key="batch_seconds", meanwhile=meanwhile)

    def _wait(self, call: Any, phase: str, *, timeout_seconds: float, key: str, **options: Any) -> Any:
        calls = [*self._announced, call]
        self._announced = []
        return self._cluster.waiter.gather(
            calls,
            names=["rollout"] * len(calls),
            phase=phase,
            timeout_seconds=timeout_seconds,
            key=f"deadlines.{key}",
            **options,
        )[-1]

    def wait_started(self, timeout_seconds: float) -> DataFacts:
        """Return facts about the prompts when the rollout side is up."""
        return self._cluster.gather_started([self._starting], names=["rollout"], timeout_seconds=timeout_seconds)[0]

    def take(self, request: BatchRequest) -> None:
        """Let the rollout side choose and cut the next batch, oldest prompts first, and return at once. The batches
        before it count as consumed."""
        self._taking = self._send_pair(RolloutActor.take, request)

    def wait_taken(self, meanwhile: Callable[[], None]) -> tuple[ObjectRef[StoredBatch], BatchFacts, dict[str, float]]:
        """Return a reference to the batch of the last take(), with what the driver reports of it and the producer's
        figures; waits until the staleness bound can be kept, and calls `meanwhile` about once a second."""
        batch, rest = self._taking
        facts, figures = self._wait_sampling(rest, "take", meanwhile)
        return batch, facts, figures

    def score(self, scoring: Scoring, results: Mapping[str, Sequence[Ref]]) -> tuple[ObjectRef[StoredFields], Scored]:
        """Return a reference to the fields to train on of the batch of the last take(), and what the driver reports.
        `results`: those of each pass, as the ranks returned them."""
        fields, rest = self._send_pair(RolloutActor.score, scoring, results)
        return fields, self._wait_call(rest, "score")

    def begin(self, version: int, state: object | None, *, ignore_changes: bool) -> None:
        """Start sampling, from the beginning or from a recover checkpoint's state."""
        self._call(RolloutActor.begin, version, state, ignore_changes)

    def set_version(self, version: int) -> None:
        """Report that the generators now sample with this version, so that prompts are admitted. Returns at once; the
        next call waits for it and raises its error."""
        self._announced.append(self._send(RolloutActor.set_version, version))

    def state_dict(self) -> object:
        return self._call(RolloutActor.state_dict)

    def samples(self) -> list[Sample]:
        """Return the best, worst and longest answer of the last batch as text; empty if samples.share=0."""
        return self._call(RolloutActor.samples)

    def evaluate(self, meanwhile: Callable[[], None]) -> dict[str, float]:
        """Return accuracy and completion length over the evaluation set. `meanwhile`: see wait_taken()."""
        return self._sampling(RolloutActor.evaluate, meanwhile)

    def lost_generators(self) -> dict[int, str]:
        """Return the generators that the rollout side has given up on, by index, with the reason."""
        return self._call(RolloutActor.lost_generators)

    def replace_generator(self, index: int, actor: Any) -> None:
        """Allow requests to this generator from now on, in place of one that has failed."""
        self._call(RolloutActor.replace_generator, index, actor)

    def close(self) -> None:
        self._call(RolloutActor.close)
