"""Spans of time, one JSON line each, in one file per process: {logs}/spans/{process}.jsonl.

    {"process": "rollout", "host": "node-1", "pid": 4711}     on every start of the process
    ["request", "generator-0", 1764000000000000, 1500, {}]    name, lane, begin and duration in microseconds, details

Times are of the host's clock, so that processes and hosts are comparable. A span is on the disk when it has ended, in
an event loop at its next turn: a process that is killed keeps what it wrote. Invariant: a process writes at most twice
`limit_bytes`; the oldest half is dropped. A process that has not called record_spans() records nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

FOLDER = "spans"
"""Below the log folder."""
MIB = "SLIPSTREAM_SPANS_MIB"
"""Environment variable of worker processes: monitor.timeline_mib."""
EARLIER = ".earlier"
"""Suffix of the file with the older half."""
_encode = json.JSONEncoder(separators=(",", ":")).encode
"""json.dumps makes an encoder for each call with separators."""

C = TypeVar("C", bound=type)


class _Recorder:
    def __init__(self, name: str, folder: Path, limit_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path, self._limit, self._lock = folder / f"{name}.jsonl", limit_bytes, threading.Lock()
        self._header = {"process": name, "host": socket.gethostname(), "pid": os.getpid()}
        self._of_this_turn: list[object] = []
        self._turn_of: asyncio.AbstractEventLoop | None = None
        """The event loop that will write them."""
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._write([self._header])

    def _write(self, rows: Sequence[object]) -> None:
        self._size += os.write(self._fd, "".join(f"{_encode(row)}\n" for row in rows).encode())

    def add(self, name: str, lane: str, begin: int, end: int, details: dict[str, object]) -> None:
        """Write a span; in an event loop together with the others that end in the same turn, as answers do."""
        row = [name, lane, begin // 1000, (end - begin) // 1000, details]
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._append([row])
            return
        with self._lock:
            self._of_this_turn.append(row)
            known, self._turn_of = self._turn_of is loop, loop
        if not known:
            loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        with self._lock:
            rows, self._of_this_turn, self._turn_of = self._of_this_turn, [], None
        try:
            self._append(rows)
        except OSError:
            _forget()

    def _append(self, rows: Sequence[object]) -> None:
        with self._lock:
            self._write(rows)
            if self._size > self._limit:
                os.close(self._fd)
                self._path.replace(self._path.with_suffix(EARLIER))
                self._open()


_recorder: _Recorder | None = None
_limit_mib = 0.0


def record_spans(name: str, folder: Path, *, limit_mib: float) -> None:
    """Record the spans of this process from now on, in a file below the log folder `folder`; at most `limit_mib` MiB
    (the newest), none with 0. A full or read-only disk ends the recording, not the run."""
    global _recorder, _limit_mib
    _recorder, _limit_mib = None, limit_mib
    if limit_mib > 0:
        try:
            _recorder = _Recorder(name, folder / FOLDER, int(limit_mib * 2**19))
        except OSError:
            return


def worker_environment() -> dict[str, str]:
    """Return the variables that give a worker process the limit of this one."""
    return {MIB: str(_limit_mib)}


def record_worker(name: str, folder: Path) -> None:
    """Do the same in a worker process, with the limit of its environment."""
    record_spans(name, folder, limit_mib=float(os.environ.get(MIB, "0")))


def _forget() -> None:
    global _recorder
    _recorder = None


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


def _add(name: str, lane: str, begin: int, end: int, details: dict[str, object]) -> None:
    try:
        if _recorder is not None:
            _recorder.add(name, lane, begin, end, details)
    except OSError:
        _forget()


def add_span(name: str, seconds: float, lane: str = "", **details: object) -> None:
    """Record a span that ends now and has taken so many seconds."""
    end = time.time_ns()
    _add(name, lane, end - int(seconds * 1e9), end, details)


def spanned(*, leave_out: Collection[str] = ()) -> Callable[[C], C]:
    """Return a class decorator that records a span for every call of a public method, besides those of `leave_out`."""

    def decorate(cls: C) -> C:
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and not name.startswith("_") and name not in leave_out:
                setattr(cls, name, _recorded(method))
        return cls

    return decorate


def _recorded(method: Callable[..., Any]) -> Callable[..., Any]:
    name = method.__name__.replace("_", " ")
    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            with span(name):
                return await method(*args, **kwargs)

        return run_async

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with span(name):
            return method(*args, **kwargs)

    return run
