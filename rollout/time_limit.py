"""How long a run of a workflow may take beside generation and scoring, which have limits of their own.

Invariant: time counts only while the workflow waits neither for a generator nor for a reward worker, so a busy server
is not the fault of a tool.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

_GRACE_SECONDS = 10.0
"""A workflow that is cancelled may take this long to end; then it is left alone."""
_MIN_WAIT_SECONDS = 0.05

_current: ContextVar[_Clock | None] = ContextVar("clock", default=None)


class WorkflowTimeoutError(TimeoutError):
    """A run of a workflow took longer than workflow.timeout_seconds."""


class _Clock:
    """Seconds in which nothing was waited for inside not_counted()."""

    def __init__(self) -> None:
        self._num_waits = 0
        self._seconds = 0.0
        self._since = _now()

    def seconds(self) -> float:
        return self._seconds if self._num_waits else self._seconds + _now() - self._since

    def enter(self) -> None:
        self._seconds = self.seconds()
        self._num_waits += 1

    def leave(self) -> None:
        self._num_waits -= 1
        self._since = _now()


class DynamicLimit:
    """A time limit of prompts: `ratio` times the mean duration of the last `count` prompts that have ended. There is
    none before `count` have ended.

    Prompts that were stopped at the limit count, too. Without them each would lower the limit for those after it,
    until every prompt is stopped."""

    def __init__(self, ratio: float, count: int) -> None:
        self._ratio, self._count, self._ended = ratio, count, deque[float](maxlen=count)

    def add(self, seconds: float) -> None:
        """Count a prompt that has ended."""
        self._ended.append(seconds)

    @property
    def seconds(self) -> float:
        """The limit; infinity: there is none yet."""
        if len(self._ended) < self._count:
            return math.inf
        return self._ratio * sum(self._ended) / self._count


@contextmanager
def not_counted() -> Iterator[None]:
    """Stop the clock of the workflow that this is called in, if any, while it waits for a generator or a reward."""
    clock = _current.get()
    if clock is None:
        yield
        return
    clock.enter()
    try:
        yield
    finally:
        clock.leave()


async def within(seconds: float | None, call: Callable[[], Coroutine[object, object, T]]) -> T:
    """Await `call()`, a run of a workflow. None: without a limit. Raises WorkflowTimeoutError after `seconds` outside
    of not_counted(), when the run is cancelled."""
    if seconds is None:
        return await call()
    clock = _Clock()
    _current.set(clock)
    run = asyncio.create_task(call())
    try:
        while (left := seconds - clock.seconds()) > 0:
            if (await asyncio.wait([run], timeout=max(left, _MIN_WAIT_SECONDS)))[0]:
                return run.result()
    finally:
        if not run.done():
            await _end(run)
    raise WorkflowTimeoutError(
        f"the workflow took more than workflow.timeout_seconds={seconds:g} beside generation and scoring; "
        "end what its tools wait for, or raise the key"
    )


async def _end(run: asyncio.Task[T]) -> None:
    run.cancel()
    await asyncio.wait([run], timeout=_GRACE_SECONDS)
    if run.done() and not run.cancelled():
        run.exception()  # it is retrieved: asyncio does not log it


def _now() -> float:
    return asyncio.get_running_loop().time()
