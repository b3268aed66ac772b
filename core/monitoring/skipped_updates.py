"""Ends a run whose updates change nothing: the optimizer skips an update whose gradient norm is not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

logger = logging.getLogger(__name__)

_SKIPPED = "update_skipped"


class SkippedUpdateError(ValueError):
    """Too many steps in a row trained nothing; another attempt from the last checkpoint would not train either."""


class SkippedUpdates:
    """Counts steps in a row in which every update of a model was skipped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = 0

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count step `step`; `metrics`: means over its updates. Raises SkippedUpdateError at the limit."""
        skipped = [name for name in metrics if name.endswith(_SKIPPED) and metrics[name] > 0]
        if skipped:
            shares = ", ".join(f"{name} {metrics[name]:.2f}" for name in skipped)
            logger.warning("Step %d: the gradient norm was not finite, updates were skipped: %s.", step, shares)
        self._in_a_row = self._in_a_row + 1 if any(metrics[name] == 1.0 for name in skipped) else 0
        if self._in_a_row >= self._limit:
            values = {name: value for name, value in metrics.items() if not math.isfinite(value)}
            wrong = f"; not finite: {', '.join(f'{name}={value}' for name, value in values.items())}" if values else ""
            raise SkippedUpdateError(
                f"step {step}: all updates of the last {self._in_a_row} steps were skipped "
                f"(exp_ctrl.max_skipped_steps={self._limit}), because the gradient norm was not finite{wrong}. Start "
                "again from the last good model with a lower optimizer.lr or gradient_clipping"
            )
