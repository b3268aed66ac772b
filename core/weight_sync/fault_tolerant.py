"""`WeightPush` that outlives generators: those that fail during a push are left out, those that have rejoined are
brought in.

A push that fails although every generator responds is repeated once, through new groups. A generator that has not taken
it then either, while others have, is restarted. After a failure generators hold old and new weights mixed, so they stay
paused with their requests until the repetition.

Invariant: when push() returns, every generator that takes part samples with the pushed version, and the rollout side
uses all participating replicas.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

from core.errors import LaunchError, PushFailure
from core.processes.signals import raise_if_interrupted
from core.weight_sync.base import FleetPush, PushReport

logger = logging.getLogger(__name__)

_LOOK_EVERY_SECONDS = 0.5
_COMPARE_EVERY_SECONDS = 10.0


class Fleet(Protocol):
    """The generators of a run, with their failures and restarts."""

    @property
    def waiting(self) -> bool: ...

    def admit(self) -> int: ...

    def membership_changed(self) -> bool: ...

    def mark_dead_generators(self) -> bool: ...

    def lose(self, index: int, why: str) -> None: ...

    def lose_named(self, names: Collection[str], why: str) -> bool: ...

    def participated(self) -> list[tuple[int, Any]]: ...

    def raise_if_all_gone(self) -> None: ...

    def failures(self) -> str: ...

    def look(self) -> None: ...


class RolloutSide(Protocol):
    """The process that sends requests to the generators."""

    def lost_generators(self) -> dict[int, str]: ...

    def replace_generator(self, index: int, actor: Any) -> None: ...


class FaultTolerantWeightSync:
    """Around the push that fits the allocation."""

    def __init__(
        self,
        push: FleetPush,
        generators: Fleet,
        rollout: RolloutSide,
        *,
        reconnect: Callable[[], None],
        patience_seconds: float,
        repeats: bool = True,
    ) -> None:
        """`reconnect` makes the senders join the generators that take part now; `patience_seconds` is how long a push
        waits while there is none. `repeats`: a push can be repeated with the same generators."""
        self._push, self._generators, self._rollout = push, generators, rollout
        self._reconnect, self._patience, self._repeats = reconnect, patience_seconds, repeats
        self._version: int | None = None
        self._compared_at = 0.0

    def offload_generators(self) -> None:
        self._push.offload_generators()

    def push(self, version: int) -> PushReport:
        """Push the weights to all working generators. Raises LaunchError when no generator is left, or a push fails
        although no generator has failed."""
        self._version = version
        failure: LaunchError | None = None
        repeated: frozenset[str] | None = None
        """The generators that the first failure named."""
        while True:
            self._wait_for_generators()
            try:
                if self._generators.membership_changed() or failure is not None:
                    self._reconnect()
                    self._push.generators_joined()
                report = self._push.push(version)
                break
            except LaunchError as e:
                failure = e
                if self._generators.mark_dead_generators():
                    logger.warning(
                        "The push of version %d failed (%s); retrying with the remaining generators", version, e
                    )
                    continue
                repeated = self._repeat(e, version, repeated)
        for index, actor in self._generators.participated():
            self._rollout.replace_generator(index, actor)
        self._compare()
        logger.debug("Pushed version %d: %s", version, report)
        return report

    def _repeat(self, failure: LaunchError, version: int, named_before: frozenset[str] | None) -> frozenset[str]:
        """Return the generators that a failure names, when the push is to be repeated. `named_before`: by the failure
        that it was repeated for, if it was. Raises the failure."""
        if not self._repeats or not isinstance(failure, PushFailure):
            raise failure
        if named_before is None:
            logger.warning("The push of version %d failed (%s); repeating it", version, failure)
            return frozenset(failure.servers)
        again = named_before.intersection(failure.servers)
        if not self._generators.lose_named(again, str(failure)):
            raise failure
        logger.warning("The push of version %d failed again (%s); restarting %s", version, failure, ", ".join(again))
        return frozenset()

    def sync_rejoined(self) -> None:
        """Send the weights of the last push to generators that have rejoined, while the trainer is idle."""
        if self._version is None:
            return
        self._generators.raise_if_all_gone()
        self._compare()
        if self._generators.waiting:
            report = self.push(self._version)
            logger.info("Pushed version %d to the restarted generators in %.2f s", self._version, report.seconds)

    def _compare(self) -> None:
        """Mark generators that the router has given up on as lost, even if they still respond. Runs only now and then,
        because the rollout side has other work."""
        if time.monotonic() - self._compared_at < _COMPARE_EVERY_SECONDS:
            return
        self._compared_at = time.monotonic()
        for index, why in self._rollout.lost_generators().items():
            self._generators.lose(index, why)

    def _wait_for_generators(self) -> None:
        deadline = time.monotonic() + self._patience
        while not self._generators.admit():
            self._generators.raise_if_all_gone()
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"no generator restarted within generator.patience_seconds={self._patience:g}: "
                    f"{self._generators.failures()}"
                )
            raise_if_interrupted()
            time.sleep(_LOOK_EVERY_SECONDS)
            self._generators.look()
