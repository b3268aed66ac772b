"""A metric with many values a step, such as the ages of trajectories: one field of a row, a chart in the trackers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

_EXACT, _MOST_BINS = 16, 64


@dataclass(frozen=True)
class Histogram:
    """Whole numbers from 0."""

    values: np.ndarray
    """[N] int64."""

    def as_json(self) -> dict[str, int]:
        """Return the number of values by value, {"0": 48, "1": 16}; above 16 by ranges of doubling width, "17-32"."""
        counts: dict[str, int] = {}
        for value, count in zip(*np.unique(self.values, return_counts=True), strict=True):
            low = int(value)
            if low > _EXACT:
                width = 1 << (low - 1).bit_length() - 1
                label = f"{width + 1}-{2 * width}"
            else:
                label = str(low)
            counts[label] = counts.get(label, 0) + int(count)
        return counts

    def bins(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (counts [B], edges [B + 1]): a bin for each value, or 64 of equal width where there are more."""
        low, high = (int(self.values.min()), int(self.values.max())) if self.values.size else (0, 0)
        edges = np.linspace(low - 0.5, high + 0.5, min(high - low + 1, _MOST_BINS) + 1)
        counts, edges = np.histogram(self.values, bins=edges)
        return counts, edges


Row = Mapping[str, float | Histogram]
"""The metrics of a step by name."""
