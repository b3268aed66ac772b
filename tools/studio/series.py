"""The metrics of a run as columns, downsampled to what a screen shows.

Invariant: a curve of at most `points` points keeps the smallest and the largest value of every interval.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from tools.studio.folders import METRICS, NotFound, Run
from tools.studio.table import (
    CACHED_BYTES,
    UNREADABLE,
    Columns,
    Source,
    cache_folder,
    pieces,
    row_at,
    source_of,
    spread_rows,
)

_PREVIEW_ROWS = 300
_PREVIEW_FROM_BYTES = 8 << 20
"""A larger file is shown by some of its rows until all are read."""
_STEP, _OFFSET = "step", "\0offset"
_SUMMED = {"time": "time/step", "tokens": "n_tokens"}
"""Axis -> the metric that it is the sum of."""
_HEAT_COLUMNS = 160


class Series:
    """The metrics of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._source: Source | None = None
        self._columns, self._histograms = _new_columns(), set[str]()
        self._preview: Columns | None = None
        self._saved_at = 0

    def refresh(self, *, stop: Callable[[], bool] = lambda: False) -> None:
        """Read the rows that were added to the file. `stop`: checked before each piece."""
        try:
            path = self._run.path(METRICS)
        except NotFound:
            return
        if self._source is None or not self._source.is_same():
            self._begin(path)
        source = self._source
        assert source is not None, "a source was begun"
        for rows in pieces(source, stop):
            with self._lock:
                _append(self._columns, rows, self._histograms)
        if source.offset - self._saved_at > CACHED_BYTES:
            self._save()

    def _begin(self, path: Path) -> None:
        with self._lock:
            self._source, self._columns, self._histograms = source_of(path), _new_columns(), set()
            self._saved_at = 0
            self._load()
            left = self._source.size - self._source.offset
            self._preview = None
            if left > _PREVIEW_FROM_BYTES and not self._columns.num_rows:
                preview, names = _new_columns(), set[str]()
                _append(preview, list(spread_rows(path, _PREVIEW_ROWS)), names)
                self._preview, self._histograms = preview, names

    @property
    def _folder(self) -> Path:
        return cache_folder(f"{self._run.id}-metrics")

    def _load(self) -> None:
        """Take the columns that an earlier studio has read of this file."""
        columns, found = _new_columns(), self._source
        assert found is not None, "called after it was begun"
        with suppress(*UNREADABLE):
            state = columns.load(self._folder)
            source = Source(**{**state["source"], "path": found.path, "size": found.size})
            if source.inode == found.inode and 0 < source.offset <= source.size:
                self._source, self._columns, self._histograms = source, columns, set(state["histograms"])
                self._saved_at = source.offset

    def _save(self) -> None:
        source = self._source
        assert source is not None, "there are columns"
        with self._lock, suppress(OSError):
            self._columns.save(self._folder, {"source": source.as_row(), "histograms": sorted(self._histograms)})
            self._saved_at = source.offset

    @property
    def _shown(self) -> Columns:
        done = self._source is None or self._source.offset >= 0.999 * self._source.size
        return self._columns if done or self._preview is None else self._preview

    @property
    def has_rows(self) -> bool:
        """Whether a step was read."""
        return self._shown.num_rows > 0

    @property
    def is_long(self) -> bool:
        """Whether only some rows of a large file were read."""
        return self._preview is not None and self._shown is self._preview

    @property
    def revision(self) -> str:
        """What changes with the rows that were read."""
        return f"{self._source.inode}:{self._source.offset}" if self._source else ""

    def status(self) -> dict[str, object]:
        """Return names, steps, what is damaged, and how much of the file was read."""
        with self._lock:
            columns, source = self._shown, self._source
            steps = columns[_STEP] if columns.num_rows else np.zeros(0)
            return {
                "metrics": [n for n in columns.names if n not in (_STEP, _OFFSET)],
                "histograms": sorted(self._histograms),
                "first_step": int(steps[0]) if steps.size else None,
                "last_step": int(steps.max()) if steps.size else None,
                "rows": columns.num_rows,
                "read": 1.0 if not source or not source.size else source.offset / source.size,
                "preview": columns is self._preview,
                "notes": source.notes if source else [],
                "revision": self.revision,
            }

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps [N], values [N]) of the rows that have a metric."""
        return self.curve(name, "step")

    def curve(self, name: str, axis: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (x [N], y [N]); `axis`: step, time (seconds) or tokens."""
        with self._lock:
            columns = self._shown
            if name not in columns:
                return np.zeros(0), np.zeros(0)
            y = columns[name]
            x = columns[_STEP].astype(np.float64)
            if (summed := _SUMMED.get(axis)) is not None:
                x = np.cumsum(np.nan_to_num(columns[summed].astype(np.float64))) if summed in columns else x
        has = np.isfinite(y)
        x, y = x[has], y[has].astype(np.float64)
        if x.size and (np.diff(x) < 0).any():
            order = np.argsort(x, kind="stable")
            x, y = x[order], y[order]
        return x, y

    def heat(self, name: str) -> dict[str, object]:
        """Return a histogram metric over the steps: {steps [C], labels [R], counts [R][C]}; at most 160 steps."""
        with self._lock:
            columns = self._shown
            rows = np.flatnonzero(np.isfinite(columns["time/step"])) if "time/step" in columns else np.arange(0)
            picked = (
                rows[np.unique(np.linspace(0, max(0, len(rows) - 1), _HEAT_COLUMNS).astype(int))] if len(rows) else rows
            )
            offsets = [int(columns[_OFFSET][i]) for i in picked]
        steps, counts = [], []
        for offset in offsets:
            row = row_at(self._run.path(METRICS), offset) or {}
            if isinstance(row.get(name), dict):
                steps.append(row["step"])
                counts.append(row[name])
        labels = sorted({str(label) for each in counts for label in each}, key=lambda text: (_number(text), text))
        return {"steps": steps, "labels": labels, "counts": [[c.get(label, 0) for c in counts] for label in labels]}


def _number(label: str) -> float:
    head = label.partition("-")[0]
    return float(head) if head.replace(".", "", 1).isdigit() else float("inf")


def _new_columns() -> Columns:
    return Columns(dtypes={_OFFSET: "i8", _STEP: "i8"})


def _append(columns: Columns, rows: Sequence[tuple[int, Mapping[str, object]]], histograms: set[str]) -> None:
    """Add rows of a file with their offsets. Neighbours with the same keys, which are nearly all, go in at once."""
    for _, alike in groupby(rows, key=lambda row: tuple(row[1])):
        block = list(alike)
        first = block[0][1]
        names = [name for name, value in first.items() if isinstance(value, int | float)]
        pick = itemgetter(_STEP, *names)
        try:
            values = np.array([pick(row) for _, row in block], np.float64).T[1:]
        except (TypeError, ValueError, OverflowError):  # a value of another type, or too large
            if len(block) > 1:
                for row in block:
                    _append(columns, [row], histograms)
            continue
        histograms |= {name for name, value in first.items() if isinstance(value, dict)}
        columns.append([_OFFSET, *names], [np.array([offset for offset, _ in block]), *values])


def downsampled(x: np.ndarray, y: np.ndarray, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `points` points of a curve: the smallest and the largest of each interval of its points."""
    if len(x) <= points:
        return x, y
    intervals = max(1, points // 2)
    edges = np.linspace(0, len(y), intervals + 1).astype(int)
    width = int(np.diff(edges).max())
    at = np.minimum(edges[:-1, None] + np.arange(width), edges[1:, None] - 1)
    values = y[at]
    lowest, highest = (edges[:-1] + f(values, axis=1) for f in (np.argmin, np.argmax))
    kept = np.unique(np.concatenate((np.minimum(lowest, len(y) - 1), np.minimum(highest, len(y) - 1))))
    return x[kept], y[kept]


def smoothed(y: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of each value and its neighbours, `window` values in all; fewer at the ends."""
    if window <= 1 or len(y) < 3:
        return y
    half = min(window // 2, len(y) - 1)
    sums = np.concatenate(([0.0], np.cumsum(y)))
    at = np.arange(len(y))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(y))
    return (sums[high] - sums[low]) / (high - low)
