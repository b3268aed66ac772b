"""A workflow that never ends is ended; a busy generator or reward worker is not its fault."""

import asyncio

import pytest

from helpers.virtual_clock import run_virtual
from rollout.time_limit import WorkflowTimeoutError, not_counted, within

pytestmark = pytest.mark.virtual_clock


def test_a_run_that_never_ends_is_cancelled_with_the_key_in_the_message() -> None:
    ended: list[str] = []

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    with pytest.raises(WorkflowTimeoutError, match=r"workflow\.timeout_seconds=0\.05 beside generation"):
        run_virtual(within(0.05, never))
    assert ended == ["cancelled"]


def test_time_in_generators_and_reward_workers_does_not_count() -> None:
    async def waits() -> str:
        async def sample() -> None:
            with not_counted():
                await asyncio.sleep(0.4)

        await asyncio.gather(sample(), sample())  # the clock stands still until the last has ended
        return "done"

    assert run_virtual(within(0.2, waits)) == "done"


def test_time_after_a_wait_counts_again() -> None:
    async def tool() -> None:
        with not_counted():
            await asyncio.sleep(0.01)
        await asyncio.Event().wait()

    with pytest.raises(WorkflowTimeoutError):
        run_virtual(within(0.1, tool))


async def test_results_and_errors_pass_and_a_cancelled_caller_ends_the_run() -> None:
    async def fails() -> None:
        raise KeyError("of the workflow")

    async def answers() -> int:
        return 3

    assert await within(None, answers) == await within(60, answers) == 3
    with pytest.raises(KeyError, match="of the workflow"):
        await within(60, fails)
    with not_counted():  # outside of a workflow nothing is measured
        pass
    started, ended = asyncio.Event(), asyncio.Event()

    async def hangs() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    caller = asyncio.create_task(within(60, hangs))
    await started.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()
