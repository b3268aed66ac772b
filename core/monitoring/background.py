"""Experiment trackers beside the training: a tracker that is slow or fails neither delays nor ends a run.

A thread sends what the loop hands over. What could not be sent is counted and logged; metrics.jsonl has all of it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from core.errors import first_line
from core.monitoring.histogram import Row
from core.monitoring.samples import Sample

logger = logging.getLogger(__name__)

_MOST_WAITING = 1000
"""Rows that wait for a tracker that does not answer; more are dropped."""


class Tracker(Protocol):
    """A service that takes metrics and samples of a run."""

    name: str
    """As users call it."""

    def write(self, step: int, metrics: Row) -> None: ...

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None: ...


class BackgroundTracker:
    """Sends rows to a tracker in the order in which they come."""

    def __init__(self, tracker: Tracker, *, close_seconds: float = 60.0) -> None:
        """`close_seconds`: close() waits at most this long for what has not been sent."""
        self._tracker, self._close_seconds = tracker, close_seconds
        self._rows: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_WAITING)
        self._lost = 0
        self._closed = False
        self._failing = False
        self._thread = threading.Thread(target=self._send, name=f"tracker {tracker.name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Row) -> None:
        """Hand over a row."""
        self._put(partial(self._tracker.write, step, dict(metrics)))

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Hand over samples."""
        self._put(partial(self._tracker.write_samples, step, list(samples)))

    def close(self) -> None:
        """Send what waits, within the limit, and log what was lost. Further calls do nothing."""
        if self._closed:
            return
        self._closed, name = True, self._tracker.name
        try:
            self._rows.put(None, timeout=self._close_seconds)
        except queue.Full:
            logger.warning("%s does not take what is left; it is abandoned.", name)
            return
        self._thread.join(self._close_seconds)
        if self._thread.is_alive():
            logger.warning("%s did not finish within %g s; what is left is abandoned.", name, self._close_seconds)
        if self._lost:
            logger.warning("%s: %d rows are missing there; metrics.jsonl has them.", name, self._lost)

    def _put(self, row: Callable[[], None]) -> None:
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._failed("it does not keep up")

    def _send(self) -> None:
        while (row := self._rows.get()) is not None:
            self._try(row)
        self._try(self._tracker.close)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 (whatever a library or a network raises; training does not need it)
            self._failed(f"{type(error).__name__}: {first_line(error)}")
            return
        if self._failing and call != self._tracker.close:
            self._failing = False
            logger.info("%s takes rows again.", self._tracker.name)

    def _failed(self, why: str) -> None:
        self._lost += 1
        if not self._failing:
            self._failing = True
            logger.warning("%s did not take a row (%s); training continues.", self._tracker.name, why)
