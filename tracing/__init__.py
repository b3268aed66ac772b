"""Records what each process of a run did and when, for `python -m tools.timeline`: spans of time, one JSON line each,
in one file per process, {logs}/spans/{process}.jsonl. Standard library only.

    {"process": "rollout", "host": "node-1", "pid": 4711}     on every start of the process
    ["request", "generator-0", 1764000000000000, 1500, {}]    name, lane, begin and duration in microseconds, details

Times are of the host's clock, so that processes and hosts are comparable. A span is on the disk when it has ended, in
an event loop after DELAY_SECONDS: a process that is killed keeps what it wrote. Invariant: a process writes at most
twice `limit_bytes`; the oldest half is dropped. A process that has not called record_spans() records nothing. Of
frequent_span() not all are recorded: the detail "of" has the number of spans that one stands for.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import TypeVar

FOLDER = "spans"
"""Below the log folder."""
MIB = "SLIPSTREAM_SPANS_MIB"
"""Environment variable of worker processes: monitor.timeline_mib."""
EARLIER = ".earlier"
"""Suffix of the file with the older half."""
DELAY_SECONDS = 0.25
"""Interval at which an event loop writes the spans that have ended: a write takes as long as several spans."""
FREQUENT = 200
"""Spans of frequent_span() that a lane records in a second at most; half as many at least where there are more."""
OF = "of"
"""Detail of a span that stands for several."""
_MOST_PENDING = 1000
_WINDOW_NS = 250_000_000
_MOST_OF = 64
"""After a burst, at most this many spans begin before one is recorded and the rate is measured again."""
_BURST = 2 * FREQUENT * _WINDOW_NS // 1_000_000_000
"""Spans that are recorded of those that begin at once, before every second one is."""
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
"""json.dumps makes an encoder for each call with separators."""

C = TypeVar("C", bound=type)


class _Sample:
    """Selects the spans of a lane that are recorded: every n-th, where n follows from the number a second."""

    __slots__ = ("_begun", "_every", "_since", "_taken", "left")

    def __init__(self) -> None:
        self._every, self._begun, self._taken = 1, 0, 0
        self._since = time.monotonic_ns()
        self.left = 1
        """Spans up to the next one that is recorded."""

    def take(self) -> int:
        """Return for how many spans the one that begins now stands, with `left` at 0, and choose the next one."""
        of, elapsed = self._every, time.monotonic_ns() - self._since
        self._begun += of
        self._taken += 1
        if elapsed >= _WINDOW_NS:
            self._every = min(_MOST_OF, max(1, math.ceil(self._begun / elapsed * 1e9 / FREQUENT)))
            self._begun, self._taken, self._since = 0, 0, self._since + elapsed
        elif self._taken >= _BURST:
            self._every, self._taken = min(_MOST_OF, 2 * self._every), 0
        self.left = self._every
        return of


class _Recorder:
    def __init__(self, name: str, folder: Path, limit_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path, self._limit, self._lock = folder / f"{name}.jsonl", limit_bytes, threading.Lock()
        self._header = {"process": name, "host": socket.gethostname(), "pid": os.getpid()}
        self._pending: list[object] = []
        self._pending_in: asyncio.AbstractEventLoop | None = None
        """The event loop that will write them."""
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._write([self._header])

    def _write(self, rows: Sequence[object]) -> None:
        self._size += os.write(self._fd, "".join(f"{_encode(row)}\n" for row in rows).encode())

    def add(self, name: str, lane: str, begin: int, end: int, details: dict[str, object]) -> None:
        """Write a span; in an event loop later, together with those that end until then."""
        row = [name, lane, begin // 1000, (end - begin) // 1000, details]
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        with self._lock:
            self._pending.append(row)
            waits = loop is not None and len(self._pending) < _MOST_PENDING
            known, self._pending_in = self._pending_in is loop, loop
        if not waits:
            self.write_pending()
        elif not known:
            assert loop is not None, "it waits"
            loop.call_later(DELAY_SECONDS, self.write_pending)

    def write_pending(self) -> None:
        """Write the spans that wait. A disk that takes them no more ends the recording."""
        with self._lock:
            rows, self._pending, self._pending_in = self._pending, [], None
            if not rows:
                return
            try:
                self._write(rows)
                if self._size > self._limit:
                    self.close()
                    self._path.replace(self._path.with_suffix(EARLIER))
                    self._open()
            except OSError:
                _forget(self)

    def close(self) -> None:
        """Close the file; write nothing until the next one is open."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_recorder: _Recorder | None = None
_samples: dict[str, _Sample] = {}
"""Samplers by lane; none without a recorder."""
_limit_mib = 0.0


def record_spans(name: str, folder: Path, *, limit_mib: float) -> None:
    """Record the spans of this process from now on, in a file below the log folder `folder`; at most `limit_mib` MiB
    (the newest), none with 0. A full or read-only disk ends the recording, not the run."""
    global _recorder, _limit_mib
    write_pending()
    if _recorder is not None:
        _recorder.close()
    _forget()
    _limit_mib = limit_mib
    if limit_mib > 0:
        try:
            _recorder = _Recorder(name, folder / FOLDER, int(limit_mib * 2**19))
        except OSError:
            return


@atexit.register
def write_pending() -> None:
    """Write the spans that an event loop would write later."""
    if _recorder is not None:
        _recorder.write_pending()


def worker_environment() -> dict[str, str]:
    """Return the variables that give a worker process the limit of this one."""
    return {MIB: str(_limit_mib)}


def record_worker(name: str, folder: Path) -> None:
    """Do the same in a worker process, with the limit of its environment."""
    record_spans(name, folder, limit_mib=float(os.environ.get(MIB, "0")))


def _forget(failed: _Recorder | None = None) -> None:
    """Record nothing any more; nothing happens where `failed` is not the recorder that records now."""
    global _recorder
    if failed is None or failed is _recorder:
        _recorder = None
        _samples.clear()


os.register_at_fork(after_in_child=_forget)  # a child is another process


class span:  # noqa: N801 (used as a function: with span("push"):)
    """Record the time of a `with` block.

    `lane`: a row of the process's picture; spans of the same lane may overlap. `details`: shown with the span. An error
    that leaves the block becomes the detail "error"."""

    __slots__ = ("_begin", "_details", "_lane", "_name")

    def __init__(self, name: str, lane: str = "", **details: object) -> None:
        self._name, self._lane, self._details = name, lane, details

    def __enter__(self) -> span:
        self._begin = time.time_ns()
        return self

    def note(self, **details: object) -> None:
        """Add details that are known at the end only."""
        self._details |= details

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._details["error"] = kind.__name__
        _add(self._name, self._lane, self._begin, time.time_ns(), self._details)


class _Nothing(span):
    """A block that is not recorded."""

    __slots__ = ()

    def __init__(self) -> None: ...

    def __enter__(self) -> span:
        return self

    def note(self, **details: object) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


_NOTHING = _Nothing()


def frequent_span(name: str, lane: str) -> span:
    """Return a span, or beyond FREQUENT a second of the lane one of several. From one thread for each lane."""
    sample = _samples.get(lane)
    if sample is None:
        if _recorder is None:
            return _NOTHING
        sample = _samples[lane] = _Sample()
    sample.left -= 1
    if sample.left > 0:
        return _NOTHING
    of = sample.take()
    return span(name, lane) if of == 1 else span(name, lane, **{OF: of})


def _add(name: str, lane: str, begin: int, end: int, details: dict[str, object]) -> None:
    if _recorder is not None:
        _recorder.add(name, lane, begin, end, details)


def add_span(name: str, seconds: float, lane: str = "", **details: object) -> None:
    """Record a span that ends now and has taken so many seconds."""
    end = time.time_ns()
    _add(name, lane, end - int(seconds * 1e9), end, details)


def spanned(*, leave_out: Collection[str] = ()) -> Callable[[C], C]:
    """Return a class decorator that records a span for every call of a public method, besides those of `leave_out`."""

    def decorate(cls: C) -> C:
        for name, method in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("_") and name not in leave_out:
                setattr(cls, name, _recorded(method))
        return cls

    return decorate


def _recorded(method: Callable[..., object]) -> Callable[..., object]:
    name = method.__name__.replace("_", " ")
    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def run_async(*args: object, **kwargs: object) -> object:
            with span(name):
                return await method(*args, **kwargs)

        return run_async

    @wraps(method)
    def run(*args: object, **kwargs: object) -> object:
        with span(name):
            return method(*args, **kwargs)

    return run
