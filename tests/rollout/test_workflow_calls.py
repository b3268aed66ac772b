"""Exits in tasks that a workflow starts: each is a failure of that call, and the event loop goes on."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Awaitable, Callable, Coroutine
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
    thread.join(10)
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
def test_an_exit_in_a_task_of_a_workflow_is_a_failure_and_the_loop_goes_on(
    way: Callable[[Call], Call], kind: type[BaseException]
) -> None:
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


def test_an_exit_in_answer_to_a_cancellation_is_a_failure_too() -> None:
    async def run() -> None:
        async def sample() -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                sys.exit("interrupted")

        task = asyncio.create_task(sample())
        await asyncio.sleep(0)
        task.cancel()
        await task

    assert str(asyncio.run(outcome_of(run))).startswith("the workflow raised SystemExit(interrupted)")


async def interrupted() -> None:
    signal.raise_signal(signal.SIGINT)
    await asyncio.sleep(60)


async def catches_it() -> None:
    try:
        await awaited(interrupted)()
    except Exception:  # noqa: BLE001 - as user code does
        return


@pytest.mark.parametrize("call", [interrupted, awaited(interrupted), in_task_group(interrupted), catches_it])
def test_a_real_interrupt_ends_the_loop_wherever_it_arrives(call: Call) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(f"signal {number}")  # with a handler of its own, asyncio.run() adds none

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt, match="signal 2"):
            asyncio.run(asyncio.wait_for(outcome_of(call), 10))
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_exit_outside_of_a_workflow_ends_the_loop_as_ever() -> None:
    async def main() -> None:
        await outcome_of(awaited(raises(ValueError("first"))))
        await asyncio.create_task(raises(SystemExit(3))())

    with pytest.raises(SystemExit, match="3"):
        asyncio.run(main())


def test_a_task_of_a_workflow_keeps_its_name_its_context_and_its_result() -> None:
    async def sample() -> str:
        task = asyncio.current_task()
        assert task is not None and task.get_stack()
        return f"{task.get_name()}, {task!r}"

    async def run() -> str:
        return await asyncio.create_task(sample(), name="mine")

    outcome = asyncio.run(outcome_of(run))
    assert isinstance(outcome, str) and outcome.startswith("mine, <Task pending name='mine' coro=<")
    assert "sample() running" in outcome


def test_a_task_that_is_cancelled_before_it_starts_leaves_no_warning() -> None:
    async def run() -> None:
        asyncio.create_task(raises(SystemExit(3))()).cancel()
        await asyncio.sleep(0)

    gc.collect()  # what other tests have left warns here
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert asyncio.run(outcome_of(run)) is None
        gc.collect()
    assert [str(warning.message) for warning in found] == []


def test_another_task_factory_of_the_loop_still_makes_the_tasks() -> None:
    made = []

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(coro)
        return asyncio.Task(coro, loop=loop, **options)

    async def main() -> Any:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(factory)
        first = await outcome_of(awaited(raises(SystemExit(3))))
        used = loop.get_task_factory()
        second = await outcome_of(awaited(raises(SystemExit(4))))
        assert loop.get_task_factory() is used, "a run makes many calls"
        assert len(made) == 4
        return first, second

    assert all("SystemExit" in str(outcome) for outcome in asyncio.run(main()))
