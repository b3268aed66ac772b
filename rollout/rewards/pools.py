"""One reward pool for each reward of a run: task sets may be judged in different ways."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from rollout.rewards.pool import RewardPool


class RewardPools:
    """Reward pools by spec. start() and close() as those of a pool."""

    def __init__(self, specs: Collection[str], **settings: Any) -> None:
        """`settings`: of every pool."""
        self._pools = {spec: RewardPool(spec, **settings) for spec in sorted(specs)}

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
