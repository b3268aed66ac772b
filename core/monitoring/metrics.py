"""The metrics of a step: histograms, memory, the file of one JSON object a line that holds them, and the end of a run
whose updates change nothing.

Invariant: every line of a journal is whole, and no step after the one that a recovered run continues from is in the
file twice.
"""

import json
import logging
import math
import os
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import could_not_write

logger = logging.getLogger(__name__)


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

PREFIX = "memory/"
DRIVER, ROLLOUT, TRAINER, TRAINER_GPU = (
    f"{PREFIX}{name}_gib" for name in ("driver", "rollout", "trainer", "trainer_gpu")
)


def peak_gib() -> float:
    """Return the largest resident size of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def split_memory(of_ranks: Iterable[dict[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Return (metrics of the first rank without memory, the largest figure of all ranks by name of memory)."""
    every = list(of_ranks)
    memory = largest({k: v for k, v in metrics.items() if k.startswith(PREFIX)} for metrics in every)
    return {k: v for k, v in every[0].items() if k not in memory}, memory


def largest(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest value of each name."""
    result: dict[str, float] = {}
    for each in figures:
        for name, value in each.items():
            result[name] = max(value, result.get(name, value))
    return result


class Journal:
    """Appends rows; every row is with the system when write() returns, so a killed process loses none."""

    def __init__(self, path: Path, *, continue_after: int | None) -> None:
        """`continue_after`: rows of later steps are removed first, they will be written anew. None: all rows stay."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if continue_after is not None and path.exists():
            drop_later(path, continue_after)
        self._path = path
        # Without a buffer a row that found no room is not tried once more when the file is closed.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (open for the whole run)

    def write(self, step: int, row: Mapping[str, object]) -> None:
        """Append a row. Raises OSError, with the free disk space, if it cannot be written."""
        left = json.dumps({"step": step, **row}, default=_as_json).encode() + b"\n"
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise could_not_write(f"the row of step {step}", self._path, error) from error

    def close(self) -> None:
        self._file.close()


def _as_json(value: object) -> object:
    """Return what json.dumps writes for a histogram."""
    if isinstance(value, Histogram):
        return value.as_json()
    raise TypeError(f"a row holds numbers, lists and histograms, got {type(value).__name__}")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a journal, oldest first, without one that is being written. Raises OSError, and ValueError
    for a file that is no journal."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def drop_later(path: Path, step: int) -> bool:
    """Remove the rows of steps after `step`, and a row that was cut off, from a journal that is not open. Return
    whether there were any."""
    kept = path.with_name(f".{path.name}.kept")
    with open(path) as rows, open(kept, "w") as out:
        for row in rows:
            # A row that was cut off by a kill belongs to a step that was not committed.
            if row.endswith("\n") and json.loads(row)["step"] <= step:
                out.write(row)
    changed = kept.stat().st_size != path.stat().st_size
    os.rename(kept, path)
    return changed


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
