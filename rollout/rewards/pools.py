"""One reward pool for each reward of a run: task sets may be judged in different ways. A run in which most completions
cannot be scored ends, as their rewards do not depend on the answers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping

from rollout.rewards.pool import RewardPool
from rollout.rewards.settings import RewardConfig

logger = logging.getLogger(__name__)

_PREFIX = "reward/num_"
_FAILURES = ("error", "memory", "timeout", "crash")
_SCORED = ("scored", "unparsable")


class RewardPools:
    """Reward pools by spec. start() and close() as those of a pool."""

    def __init__(self, specs: Collection[str], config: RewardConfig) -> None:
        self._pools = {
            spec: RewardPool(spec, num_workers=config.num_workers, timeout_seconds=config.timeout_seconds)
            for spec in sorted(specs)
        }

    def of(self, spec: str) -> RewardPool:
        """Return the pool of a reward."""
        return self._pools[spec]

    async def start(self) -> None:
        """Start the workers. Raises RewardWorkerError."""
        for pool in self._pools.values():
            await pool.start()

    async def close(self) -> None:
        """End the workers."""
        for pool in self._pools.values():
            await pool.close()

    @property
    def last_error(self) -> str:
        """Why a completion could not be scored, in one line."""
        found = [pool.last_error for pool in self._pools.values()]
        return next((error for error in found if error != "none"), "none")

    def stats(self) -> dict[str, float]:
        """Return the sums of the pools' figures."""
        total: Counter[str] = Counter()
        for pool in self._pools.values():
            total.update(pool.stats())
        return dict(total)


class RewardFailureError(ValueError):
    """Most completions of several batches in a row could not be scored; another attempt would not score them either."""


class FailedScores:
    """Compares the counts of a reward pool from batch to batch."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._before: dict[str, float] = {}
        self._in_a_row = 0

    def check(self, stats: Mapping[str, float], *, step: int, last_error: str) -> float:
        """Return the share of the completions since the last call that could not be scored; log a warning when that
        are too many. `stats`: of the reward pool, since its start. Raises RewardFailureError."""
        counts = {name: stats.get(_PREFIX + name, 0.0) for name in (*_FAILURES, *_SCORED)}
        new = {name: count - self._before.get(name, 0.0) for name, count in counts.items()}
        self._before = counts
        failed, total = sum(new[name] for name in _FAILURES), sum(new.values())
        share = failed / total if total else 0.0
        if share <= self._config.max_failed_share:
            self._in_a_row = 0
            return share
        self._in_a_row += 1
        reasons = ", ".join(f"{new[name]:.0f} {name}" for name in _FAILURES if new[name])
        message = f"step {step}: {failed:.0f} of {total:.0f} completions could not be scored ({reasons}) "
        message += "and count as wrong (-1)"
        logger.warning("%s. The last error: %s", message, last_error)
        if self._in_a_row >= self._config.max_failed_batches:
            raise RewardFailureError(
                f"reward.function: {message}, as in the {self._in_a_row} steps up to here (reward.max_failed_share="
                f"{self._config.max_failed_share:g}, reward.max_failed_batches={self._config.max_failed_batches}). "
                f"The last error: {last_error}"
            )
        return share
