"""Calls of workflows, which are user code: what they return, raise or cancel reaches the caller as a value.

Invariant: a call raises CancelledError if, and only if, the task that awaits it is cancelled. asyncio.TaskGroup cancels
the task that it runs in when a child fails, and up to Python 3.12 leaves its count cancelling() above 0. Each call
therefore runs in a task of its own.

Invariant: no exit in the task of a call, nor in a task that it starts, ends the event loop. asyncio ends the loop when
a task raises SystemExit or KeyboardInterrupt, and no other sample would be finished. A task of a workflow therefore
raises what as_failure() makes of them. A KeyboardInterrupt in the main thread is not converted: it may be a Ctrl-C.
Not covered: callbacks of the loop, and tasks that are not made by create_task() or a TaskGroup.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from rollout.plugins import clarify

T = TypeVar("T")

_in_workflow: ContextVar[bool] = ContextVar("in_workflow", default=False)
"""Whether the current task is that of a call, or was started by one."""


async def outcome_of(call: Callable[[], Awaitable[T]], *, fatal: tuple[type[Exception], ...] = ()) -> T | Exception:
    """Await `call()` to its end; return its result, or the error that it failed with, see as_failure().

    Cancelling the caller cancels the call and waits for its end."""
    outcome: T | BaseException
    task = asyncio.current_task()
    _contain_exits(asyncio.get_running_loop())
    try:
        outcome = await asyncio.create_task(_caught(call))
    except asyncio.CancelledError as error:  # of the caller, or of its own task by the call
        outcome = error
    if task is not None and task.cancelling():
        raise asyncio.CancelledError  # the call has taken the cancellation for its own
    return as_failure(outcome, fatal=fatal) if isinstance(outcome, BaseException) else outcome


async def _caught(call: Callable[[], Awaitable[T]]) -> T | BaseException:
    _in_workflow.set(True)
    try:
        return await call()
    except BaseException as error:  # noqa: BLE001 - user code
        if _may_be_signal(error):
            raise
        clarify(error)
        return error


def _contain_exits(loop: asyncio.AbstractEventLoop) -> None:
    """Let tasks that are started inside a call contain exits, from now on."""
    factory = loop.get_task_factory()
    if not isinstance(factory, _TaskFactory):
        loop.set_task_factory(_TaskFactory(factory))


class _TaskFactory:
    """A task factory in front of `factory`, or of asyncio.Task."""

    def __init__(self, factory: Callable[..., Any] | None) -> None:
        self._factory = factory

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        if _in_workflow.get() and asyncio.iscoroutine(coro):
            coro = _Contained(coro)
        return (
            asyncio.Task(coro, loop=loop, **options) if self._factory is None else self._factory(loop, coro, **options)
        )


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine, of which an exit is an error. No `async def` around it: that would leave it without an await, with a
    warning, where its task is cancelled before it starts."""

    def __init__(self, coro: Coroutine[Any, Any, Any]) -> None:
        self._coro = coro

    def send(self, value: Any) -> Any:
        return _without_exits(self._coro.send, value)

    def throw(self, *error: Any) -> Any:
        return _without_exits(self._coro.throw, *error)

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coro.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coro, name)  # its name and its frames, for asyncio's messages


def _without_exits(step: Callable[..., Any], *arguments: Any) -> Any:
    """Call `step`; raise the failure in place of an exit."""
    try:
        return step(*arguments)
    except (SystemExit, KeyboardInterrupt) as error:
        if _may_be_signal(error):
            raise
        failure = as_failure(error)
    raise failure  # not while the exit is handled: the traceback would have it twice


def _may_be_signal(error: BaseException) -> bool:
    """Return whether the error may be a Ctrl-C or a SIGTERM, which Python raises in the main thread only."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def as_failure(error: BaseException, *, fatal: tuple[type[Exception], ...] = ()) -> Exception:
    """Return the failure of a workflow as an error to raise: an exit of the workflow does not end the process, nor does
    a cancellation inside it cancel the caller. The error has the traceback and the cause of the exit.

    An exception group, as of asyncio.TaskGroup, becomes its first error, with the others in a note: an error of a type
    in `fatal` only if all of them are."""
    if isinstance(error, BaseExceptionGroup):
        errors = list(_errors_in(error))
        first = next((e for e in errors if not isinstance(e, fatal)), errors[0])
        failure = as_failure(first)
        if others := [repr(e) for e in errors if e is not first]:
            failure.add_note(f"raised together with {len(others)} more: {', '.join(others)}")
        return failure
    if isinstance(error, Exception):
        return error
    if isinstance(error, asyncio.CancelledError):
        return RuntimeError("something that the workflow awaited was cancelled")
    failure = RuntimeError(f"the workflow raised {type(error).__name__}({error}): it must return or raise an Exception")
    failure.__cause__, failure.__context__ = error.__cause__, error.__context__
    failure.__suppress_context__ = error.__suppress_context__
    return failure.with_traceback(error.__traceback__)  # its last frame is the place that a message names


def _errors_in(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the errors of a group and of the groups in it, in their order."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _errors_in(error)
        else:
            yield error
