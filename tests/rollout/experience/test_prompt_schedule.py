"""Steps, epochs and the prompts of each."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.experience import ENDLESS, Schedule, StalenessAdmission


@settings(max_examples=200, deadline=None)
@given(num_prompts=st.integers(1, 30), batch_size=st.integers(1, 40), num_epochs=st.integers(1, 4))
def test_a_schedule_cuts_every_epoch_into_whole_steps(num_prompts: int, batch_size: int, num_epochs: int) -> None:
    schedule = Schedule(num_prompts=num_prompts, batch_size=batch_size, total_epochs=num_epochs)
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
def test_a_schedule_that_is_cut_short_starts_no_prompt_of_a_later_step(num_prompts, batch_size, num_steps) -> None:
    whole = Schedule(num_prompts=num_prompts, batch_size=batch_size, total_epochs=3)
    cut = replace(whole, total_steps_limit=num_steps)
    admission = StalenessAdmission(cut, max_staleness=100)
    started = [k for k in range(3 * num_prompts) if admission.admits(k, next_step=0, version=0)]
    assert started == [k for k in range(3 * num_prompts) if whole.step_of(k) < num_steps]
    assert [cut.batch_of(step) for step in range(num_steps)] == [whole.batch_of(step) for step in range(num_steps)]


def test_an_endless_schedule_has_a_batch_at_every_step() -> None:
    schedule = Schedule(num_prompts=5, batch_size=2)
    assert schedule.total_epochs == ENDLESS
    assert [schedule.batch_of(step) for step in (0, 2, 3 * 10**12, 3 * 10**12 + 2)] == [2, 1, 2, 1]
    assert StalenessAdmission(schedule, 0).admits(1, next_step=3 * 10**12, version=3 * 10**12)
    assert not StalenessAdmission(schedule, 0).admits(2, next_step=3 * 10**12, version=3 * 10**12)


def test_a_run_that_is_cut_short_has_fewer_steps_in_its_last_epoch() -> None:
    whole = Schedule(num_prompts=10, batch_size=4, total_epochs=3)
    assert (whole.num_epochs, [whole.steps_of_epoch(epoch) for epoch in (1, 2, 3)]) == (3, [3, 3, 3])
    cut = replace(whole, total_steps_limit=4)
    assert (cut.num_epochs, [cut.steps_of_epoch(epoch) for epoch in (1, 2)]) == (2, [3, 1])
    assert replace(cut, total_steps_limit=3).num_epochs == 1


def test_beyond_the_last_step_nothing_is_consumed_but_positions_go_on() -> None:
    schedule = Schedule(num_prompts=10, batch_size=4, total_epochs=2, total_steps_limit=4)
    assert (schedule.total_steps, schedule.total_prompts) == (4, 14)
    assert [schedule.consumed_before(step) for step in (3, 4, 5, 6)] == [10, 14, 14, 14]
    assert [schedule.first_prompt_of(step) for step in (3, 4, 5, 6)] == [10, 14, 18, 20]


def test_a_negative_staleness_is_refused() -> None:
    with pytest.raises(ValueError, match="max_staleness=-1"):
        StalenessAdmission(Schedule(num_prompts=1, batch_size=1), -1)
