"""Ends a run in which most completions cannot be scored: their rewards do not depend on the answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)

_PREFIX = "reward/num_"
_FAILURES = ("error", "memory", "timeout", "crash")
_SCORED = ("scored", "unparsable")


class RewardFailureError(ValueError):
    """Most completions of several batches in a row could not be scored; another attempt would not score them either."""


class FailedScores:
    """Compares the counts of a reward pool from batch to batch."""

    def __init__(self, *, max_share: float, max_batches: int) -> None:
        """A batch fails when more than `max_share` of its completions could not be scored; `max_batches` in a row end
        the run."""
        self._max_share, self._max_batches = max_share, max_batches
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
        if share <= self._max_share:
            self._in_a_row = 0
            return share
        self._in_a_row += 1
        reasons = ", ".join(f"{new[name]:.0f} {name}" for name in _FAILURES if new[name])
        message = f"step {step}: {failed:.0f} of {total:.0f} completions could not be scored ({reasons}) "
        message += "and count as wrong (-1)"
        logger.warning("%s. The last error: %s", message, last_error)
        if self._in_a_row >= self._max_batches:
            raise RewardFailureError(
                f"reward.function: {message}, as in the {self._in_a_row} steps up to here (reward.max_failed_share="
                f"{self._max_share:g}, reward.max_failed_batches={self._max_batches}). The last error: {last_error}"
            )
        return share
