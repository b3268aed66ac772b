"""Calls of workflows, which are user code: what they return, raise or cancel reaches the caller as a value.

Invariant: a call raises CancelledError if, and only if, the task that awaits it is cancelled. asyncio.TaskGroup cancels
the task that it runs in when a child fails, and up to Python 3.12 leaves its count cancelling() above 0. Each call
therefore runs in a task of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


async def outcome_of(call: Callable[[], Awaitable[T]], *, fatal: tuple[type[Exception], ...] = ()) -> T | Exception:
    """Await `call()` to its end; return its result, or the error that it failed with, see as_failure().

    Cancelling the caller cancels the call and waits for its end."""
    outcome: T | BaseException
    task = asyncio.current_task()
    try:
        outcome = await asyncio.create_task(_caught(call))
    except asyncio.CancelledError as error:  # of the caller, or of its own task by the call
        outcome = error
    if task is not None and task.cancelling():
        raise asyncio.CancelledError  # the call has taken the cancellation for its own
    return as_failure(outcome, fatal=fatal) if isinstance(outcome, BaseException) else outcome


async def _caught(call: Callable[[], Awaitable[T]]) -> T | BaseException:
    try:
        return await call()
    except BaseException as error:  # noqa: BLE001 - a SystemExit in a task would end the event loop
        return error


def as_failure(error: BaseException, *, fatal: tuple[type[Exception], ...] = ()) -> Exception:
    """Return the failure of a workflow as an error to raise: an exit of the workflow does not end the process, nor does
    a cancellation inside it cancel the caller. (An exit in a task that the workflow starts ends the event loop.)

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
    failure.__cause__ = error
    return failure


def _errors_in(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the errors of a group and of the groups in it, in their order."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _errors_in(error)
        else:
            yield error
