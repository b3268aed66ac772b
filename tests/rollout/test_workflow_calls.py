"""Exits in tasks that a workflow starts: each is a failure of that call, and the event loop goes on."""

import asyncio
import gc
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import pytest

from rollout.plugins import user_place
from rollout.workflow_calls import outcome_of

Call = Callable[[], Awaitable[Any]]


class Unusual(BaseException):
    """Neither an Exception nor one of those that asyncio treats apart."""


def in_thread(main: Coroutine[Any, Any, Any]) -> Any:
    """asyncio.run() as in a Ray actor: in another thread than the main one."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(main)))
    thread.start()
    thread.join(60)
    assert found, "the event loop has ended with an error"
    return found[0]


def raises(error: BaseException) -> Callable[[], Coroutine[Any, Any, None]]:
    async def leave() -> None:
        await asyncio.sleep(0)
        raise error

    return leave


def awaited(leave: Call) -> Call:
    async def run() -> None:
        await asyncio.create_task(leave())

    return run


def in_task_group(leave: Call) -> Call:
    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(60))
            tasks.create_task(leave())

    return run


def gathered(leave: Call) -> Call:
    async def run() -> None:
        await asyncio.gather(asyncio.sleep(0), leave())

    return run


def nested(leave: Call) -> Call:
    return awaited(in_task_group(awaited(leave)))


def at_cancellation(leave: Call) -> Call:
    async def run() -> None:
        async def sample() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await leave()

        task = asyncio.create_task(sample())
        await asyncio.sleep(0)
        task.cancel()
        await task

    return run


WAYS = [awaited, in_task_group, gathered, nested, at_cancellation]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, Unusual])
@pytest.mark.parametrize("way", WAYS)
def test_an_exit_in_a_task_of_a_workflow_is_a_failure_and_the_loop_goes_on(way, kind) -> None:
    async def other() -> str:
        await asyncio.sleep(0.05)
        return "finished"

    async def main() -> tuple[Any, Any]:
        return await asyncio.gather(outcome_of(way(raises(kind("no such key")))), outcome_of(other))

    failure, finished = in_thread(main())
    assert finished == "finished"
    message = rf"the workflow raised {kind.__name__}(no such key): it must return or raise an Exception"
    assert isinstance(failure, RuntimeError) and str(failure) == message
    assert user_place(failure).startswith("test_workflow_calls.py, line ")
    assert user_place(failure).endswith("in leave")
    assert "".join(traceback.format_exception(failure)).count("in leave") == 1


def test_the_failure_has_the_cause_of_its_exit() -> None:
    async def leave() -> None:
        try:
            {}["token"]
        except KeyError:
            sys.exit("no token")

    shown = "".join(traceback.format_exception(asyncio.run(outcome_of(awaited(leave)))))
    assert "KeyError: 'token'" in shown and "the workflow raised SystemExit(no token)" in shown


async def interrupted() -> None:
    signal.raise_signal(signal.SIGINT)
    await asyncio.sleep(60)


async def catches_it() -> None:
    try:
        await awaited(interrupted)()
    except Exception:  # noqa: BLE001 - as user code does
        return


@pytest.fixture
def tasks_are_collected() -> Iterator[None]:
    """Destroy the tasks that the interrupt left here: asyncio logs each, which must not happen inside another test."""
    yield
    gc.collect()


@pytest.mark.usefixtures("tasks_are_collected")
@pytest.mark.parametrize("call", [interrupted, awaited(interrupted), in_task_group(interrupted), catches_it])
def test_a_real_interrupt_ends_the_loop_wherever_it_arrives(call: Call) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(f"signal {number}")  # with a handler of its own, asyncio.run() adds none

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt, match="signal 2"):
            asyncio.run(asyncio.wait_for(outcome_of(call), 60))
    finally:
        signal.signal(signal.SIGINT, before)
