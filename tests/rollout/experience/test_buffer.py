"""The buffer's order, its staleness bound, and what it holds across a restart."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_sampling import make_prompts, trajectory
from virtual_clock import run_virtual, settle

from rollout.experience.buffer import StalenessBuffer, StalenessInvariantError, StepSchedule
from rollout.types import Trajectory


def group(position: int, *versions: int) -> list[Trajectory]:
    (prompt,) = make_prompts(1)
    made = trajectory(prompt, np.array(versions, dtype=np.int32))
    return [Trajectory(**(vars(made) | {"query_id": f"q{position}"}))]


def names(groups: list[list[Trajectory]]) -> list[str]:
    return [group[0].query_id for group in groups]


@settings(max_examples=200, deadline=None)
@given(num_prompts=st.integers(1, 30), batch_size=st.integers(1, 40), num_epochs=st.integers(1, 4))
def test_a_schedule_cuts_every_epoch_into_whole_steps(num_prompts: int, batch_size: int, num_epochs: int) -> None:
    schedule = StepSchedule(num_prompts=num_prompts, batch_size=batch_size, num_epochs=num_epochs)
    positions = range(num_epochs * num_prompts)
    num_steps = num_epochs * schedule.steps_per_epoch
    steps = [[k for k in positions if schedule.step_of(k) == step] for step in range(num_steps)]
    assert [len(step) for step in steps] == [schedule.batch_of(step) for step in range(num_steps)]
    assert [k for step in steps for k in step] == list(positions)
    assert schedule.batch_of(num_steps) == 0
    assert [schedule.consumed_before(step) for step in range(num_steps)] == [step[0] for step in steps]
    assert {k // num_prompts for k in steps[-1]} == {num_epochs - 1}


@settings(max_examples=100, deadline=None)
@given(num_prompts=st.integers(1, 30), batch_size=st.integers(1, 40), num_steps=st.integers(1, 9))
def test_a_schedule_that_is_cut_short_starts_no_prompt_of_a_later_step(
    num_prompts: int, batch_size: int, num_steps: int
) -> None:
    whole = StepSchedule(num_prompts=num_prompts, batch_size=batch_size, num_epochs=3)
    cut = replace(whole, num_steps=num_steps)
    buffer = StalenessBuffer(cut, max_staleness=100)
    started = [k for k in range(3 * num_prompts) if buffer.may_start(k, 0)]
    assert started == [k for k in range(3 * num_prompts) if whole.step_of(k) < num_steps]
    assert [cut.batch_of(step) for step in range(num_steps)] == [whole.batch_of(step) for step in range(num_steps)]


def due_by_brute_force(buffer: StalenessBuffer, started: dict[int, int], finished: set[int], step: int) -> bool:
    """Is there a batch of finished tickets that leaves behind only what can still be in time?"""
    schedule, size = buffer.schedule, buffer.schedule.batch_of(step)

    def in_time(left: list[int]) -> bool:
        deadlines = [started[position] + buffer.max_staleness for position in left]
        return all(
            sum(deadline <= last for deadline in deadlines) <= sum(map(schedule.batch_of, range(step + 1, last + 1)))
            for last in range(step, max(deadlines, default=step) + 1)
        )

    return any(in_time([k for k in started if k not in batch]) for batch in combinations(sorted(finished), size))


@settings(max_examples=100, deadline=None)
@given(
    max_staleness=st.integers(0, 3),
    batch_size=st.integers(1, 3),
    num_prompts=st.integers(1, 6),
    data=st.data(),
)
def test_take_waits_exactly_as_long_as_it_must_and_the_bound_never_breaks(
    max_staleness: int, batch_size: int, num_prompts: int, data: st.DataObject
) -> None:
    """Prompts start late, end in any order, and are restarted; the weights lag behind the steps by up to one."""
    schedule = StepSchedule(num_prompts=num_prompts, batch_size=batch_size, num_epochs=2)
    num_steps = 2 * schedule.steps_per_epoch
    consumed: list[str] = []

    async def main() -> None:
        buffer = StalenessBuffer(schedule, max_staleness=max_staleness)
        started: dict[int, int] = {}
        finished: set[int] = set()
        version, position = 0, 0
        for step in range(num_steps):
            taking = asyncio.create_task(buffer.take(step))
            while True:
                await settle()
                assert taking.done() == due_by_brute_force(buffer, started, finished, step)
                if taking.done():
                    break
                running = sorted(started.keys() - finished)
                choices = ["finish"] * bool(running) + ["restart"] * bool(running)
                choices += ["start"] * buffer.may_start(position, version) + ["push"] * (version < step)
                choice = data.draw(st.sampled_from(choices))
                if choice == "push":
                    version += 1
                elif choice == "start":
                    started[position] = version
                    buffer.start(position, version)
                    position += 1
                else:
                    chosen = data.draw(st.sampled_from(running))
                    if choice == "restart":
                        started[chosen] = version
                        await buffer.restart(chosen, version)
                        continue
                    finished.add(chosen)
                    await buffer.put(chosen, group(chosen, started[chosen], version))
            taken = names(await taking)
            oldest = sorted(finished, key=lambda k: (started[k], k))[: len(taken)]
            assert taken == [f"q{k}" for k in oldest]
            for k in oldest:
                assert step - started.pop(k) <= max_staleness
                finished.discard(k)
            consumed.extend(taken)

    run_virtual(main())
    assert sorted(consumed) == sorted(f"q{k}" for k in range(2 * num_prompts))


def fill(buffer: StalenessBuffer, versions: list[int], finished: list[int]) -> None:
    async def main() -> None:
        for position, version in enumerate(versions):
            buffer.start(position, version)
        for position in finished:
            await buffer.put(position, group(position, versions[position]))

    asyncio.run(main())


def endless(batch_size: int) -> StepSchedule:
    return StepSchedule(num_prompts=1000, batch_size=batch_size)


def test_a_slow_prompt_is_waited_for_only_when_it_could_be_late_otherwise() -> None:
    async def main() -> None:
        buffer = StalenessBuffer(endless(2), max_staleness=2)
        for position, version in enumerate([0, 0, 0, 0]):
            buffer.start(position, version)
        for position in (1, 2, 3):
            await buffer.put(position, group(position, 0))
        assert names(await buffer.take(0)) == ["q1", "q2"]
        for position in (4, 5):
            buffer.start(position, 1)
            await buffer.put(position, group(position, 1))
        assert names(await buffer.take(1)) == ["q3", "q4"]
        buffer.start(6, 2)
        await buffer.put(6, group(6, 2))
        taking = asyncio.create_task(buffer.take(2))
        await settle()
        assert not taking.done(), "q0 is due now, whatever else is there"
        await buffer.put(0, group(0, 0, 1, 2))
        assert names(await taking) == ["q0", "q5"]
        stats = buffer.stats()
        assert (stats["staleness/max"], stats["staleness/age_2"], stats["staleness/age_1"]) == (2, 1, 1)

    run_virtual(main())


def test_masking_waits_for_no_one_and_masks_only_tokens_that_are_too_old() -> None:
    async def main() -> None:
        buffer = StalenessBuffer(endless(1), max_staleness=1, over_age="mask")
        for position in range(4):
            buffer.start(position, 0)
        for step, position in enumerate((1, 2)):
            await buffer.put(position, group(position, 0))
            assert names(await buffer.take(step)) == [f"q{position}"]
        await buffer.put(0, group(0, 0, 0, 1, 2))
        await buffer.put(3, group(3, 0, 0))
        ((late,),) = await buffer.take(2)
        assert late.loss_mask.tolist() == [False, False, False, False, True, True]
        assert late.versions.tolist() == [-1, -1, 0, 0, 1, 2]
        ((hopeless,),) = await buffer.take(3)
        assert not hopeless.loss_mask.any()
        assert buffer.stats()["rollout/num_masked_tokens"] == 4

    run_virtual(main())


def test_tokens_older_than_their_ticket_break_the_invariant_loudly() -> None:
    async def main() -> None:
        buffer = StalenessBuffer(endless(1), max_staleness=0)
        buffer.next_step = 3
        buffer.start(3, 3)
        await buffer.put(3, group(3, 2, 3))
        with pytest.raises(StalenessInvariantError, match="step 3 got a trajectory of q3 sampled from version 2"):
            await buffer.take(3)

    run_virtual(main())


def test_more_tickets_than_can_be_in_time_break_the_invariant_loudly() -> None:
    async def main() -> None:
        buffer = StalenessBuffer(endless(1), max_staleness=0)
        for position in range(2):
            buffer.start(position, 0)
            await buffer.put(position, group(position, 0))
        with pytest.raises(StalenessInvariantError, match="2 prompts must be trained by step 0, which has room for 1"):
            await buffer.take(0)

    run_virtual(main())


def test_take_raises_the_error_of_fail_before_and_after() -> None:
    async def main() -> None:
        buffer = StalenessBuffer(endless(1), max_staleness=0)
        taking = asyncio.create_task(buffer.take(0))
        await settle()
        await buffer.fail(KeyError("first"))
        await buffer.fail(KeyError("second"))
        with pytest.raises(KeyError, match="first"):
            await taking
        with pytest.raises(KeyError, match="first"):
            await buffer.take(0)

    run_virtual(main())


def test_a_cancelled_take_loses_nothing() -> None:
    async def main() -> None:
        buffer = StalenessBuffer(endless(2), max_staleness=0)
        for position in range(2):
            buffer.start(position, 0)
        await buffer.put(0, group(0, 0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(buffer.take(0), 1.0)
        await buffer.put(1, group(1, 0))
        assert names(await buffer.take(0)) == ["q0", "q1"]

    run_virtual(main())


def test_steps_are_taken_in_order_and_not_beyond_the_last() -> None:
    async def main() -> None:
        buffer = StalenessBuffer(StepSchedule(num_prompts=2, batch_size=2, num_epochs=1), max_staleness=0)
        with pytest.raises(ValueError, match=r"take\(1\): the next step is 0 of 1"):
            await buffer.take(1)
        for position in range(2):
            buffer.start(position, 0)
            await buffer.put(position, group(position, 0))
        await buffer.take(0)
        with pytest.raises(ValueError, match=r"take\(1\): the next step is 1 of 1"):
            await buffer.take(1)
        assert not buffer.may_start(2, version=9)

    run_virtual(main())


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="max_staleness=-1"):
        StalenessBuffer(endless(1), max_staleness=-1)
    with pytest.raises(ValueError, match="over_age='drop'"):
        StalenessBuffer(endless(1), max_staleness=1, over_age="drop")


def test_a_restored_buffer_hands_out_what_the_first_one_would_have() -> None:
    first = StalenessBuffer(endless(2), max_staleness=1)
    fill(first, [0, 0, 0, 0], finished=[3, 0, 1])
    assert first.in_flight() == [2]
    restored = StalenessBuffer(endless(2), max_staleness=1)
    restored.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    for buffer in (first, restored):
        ((one,), (two,)) = asyncio.run(buffer.take(0))
        assert (one.query_id, two.query_id) == ("q0", "q1")
        assert one.versions.tolist() == [-1, -1, 0]
        assert buffer.next_step == 1
        assert buffer.in_flight() == [2]


def test_the_count_of_masked_tokens_goes_on_after_a_restart_and_leaves_out_what_was_not_trained() -> None:
    async def main() -> None:
        first = StalenessBuffer(endless(1), max_staleness=0, over_age="mask")
        (answer,) = group(0, 0, 0, 0)
        answer.loss_mask[3] = False  # between two turns
        first.start(0, 0)
        first.start(1, 0)
        first.start(2, 0)
        await first.put(2, group(2, 0))
        await first.take(0)
        await first.put(0, [answer])
        ((masked,),) = await first.take(1)
        assert not masked.loss_mask.any()
        assert first.stats()["rollout/num_masked_tokens"] == 2
        restored = StalenessBuffer(endless(1), max_staleness=0, over_age="mask")
        restored.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
        await restored.put(1, group(1, 0, 0, 0, 2))
        await restored.take(2)
        assert restored.stats()["rollout/num_masked_tokens"] == 5

    run_virtual(main())
