"""The order in which prompt slots are selected, the staleness bound, and what the store holds across a restart."""

from __future__ import annotations

import asyncio
import pickle
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.simulated_sampling import make_prompts, trajectory
from helpers.virtual_clock import run_virtual, settle
from rollout.experience import (
    MemoryStore,
    OverAge,
    Schedule,
    StalenessAdmission,
    StalenessInvariantError,
    make_experience,
)
from rollout.experience.ages import age_metrics
from rollout.types import Trajectory


def group(position: int, *versions: int) -> list[Trajectory]:
    (prompt,) = make_prompts(1)
    made = trajectory(prompt, np.array(versions, dtype=np.int32))
    return [Trajectory(**(vars(made) | {"query_id": f"q{position}"}))]


def names(groups: list[list[Trajectory]]) -> list[str]:
    return [group[0].query_id for group in groups]


def make_store(schedule: Schedule, max_staleness: int, *, over_age: OverAge = "wait") -> MemoryStore:
    experience = make_experience(
        num_prompts=schedule.num_prompts, batch_size=schedule.batch_size, max_staleness=max_staleness,
        over_age=over_age, num_epochs=schedule.total_epochs,
    )  # fmt: skip
    store = experience.store
    assert isinstance(store, MemoryStore)
    return store


def due_by_brute_force(
    schedule: Schedule, max_staleness: int, started: dict[int, int], finished: set[int], step: int
) -> bool:
    """Is there a batch of ready slots that leaves behind only what can still be in time?"""
    size = schedule.batch_of(step)

    def in_time(left: list[int]) -> bool:
        deadlines = [started[position] + max_staleness for position in left]
        return all(
            sum(deadline <= last for deadline in deadlines) <= sum(map(schedule.batch_of, range(step + 1, last + 1)))
            for last in range(step, max(deadlines, default=step) + 1)
        )

    return any(in_time([k for k in started if k not in batch]) for batch in combinations(sorted(finished), size))


def test_a_slot_that_restarted_from_newer_weights_comes_after_an_older_one() -> None:
    async def main() -> list[str]:
        store = make_store(Schedule(num_prompts=6, batch_size=1, total_epochs=1), max_staleness=2)
        for position in range(3):
            store.start(position, 0)
        await store.put(2, group(2, 0))
        assert names(await store.select(0)) == ["q2"]
        await store.restart(0, 1)
        await store.put(0, group(0, 1))
        await store.put(1, group(1, 0))
        return names(await store.select(1))

    assert run_virtual(main()) == ["q1"]


def test_a_select_that_waits_for_an_old_slot_ends_when_the_slot_restarts() -> None:
    async def main() -> list[str]:
        store = make_store(Schedule(num_prompts=6, batch_size=1, total_epochs=1), max_staleness=1)
        store.start(0, 0)
        store.start(1, 0)
        await store.put(1, group(1, 0))
        assert names(await store.select(0)) == ["q1"]
        store.start(2, 1)
        await store.put(2, group(2, 1))
        selecting = asyncio.create_task(store.select(1))
        await settle()
        assert not selecting.done(), "slot 0 would be two steps old in step 2"
        await store.restart(0, 1)
        await settle()
        assert selecting.done()
        return names(selecting.result())

    assert run_virtual(main()) == ["q2"]


@settings(max_examples=100, deadline=None)
@given(
    max_staleness=st.integers(0, 3),
    batch_size=st.integers(1, 3),
    num_prompts=st.integers(1, 6),
    data=st.data(),
)
def test_select_waits_exactly_as_long_as_it_must_and_the_bound_never_breaks(
    max_staleness: int, batch_size: int, num_prompts: int, data: st.DataObject
) -> None:
    """Prompts start late, end in any order, and are restarted; the weights lag behind the steps by up to one."""
    schedule = Schedule(num_prompts=num_prompts, batch_size=batch_size, total_epochs=2)
    admission = StalenessAdmission(schedule, max_staleness)
    num_steps = 2 * schedule.steps_per_epoch
    consumed: list[str] = []

    async def main() -> None:
        store = make_store(schedule, max_staleness=max_staleness)
        started: dict[int, int] = {}
        finished: set[int] = set()
        version, position = 0, 0
        for step in range(num_steps):
            taking = asyncio.create_task(store.select(step))
            while True:
                await settle()
                assert taking.done() == due_by_brute_force(schedule, max_staleness, started, finished, step)
                if taking.done():
                    break
                running = sorted(started.keys() - finished)
                choices = ["finish"] * bool(running) + ["restart"] * bool(running)
                choices += ["start"] * admission.may_start(position, version) + ["push"] * (version < step)
                choice = data.draw(st.sampled_from(choices))
                if choice == "push":
                    version += 1
                elif choice == "start":
                    started[position] = version
                    store.start(position, version)
                    position += 1
                else:
                    chosen = data.draw(st.sampled_from(running))
                    if choice == "restart":
                        started[chosen] = version
                        await store.restart(chosen, version)
                        continue
                    finished.add(chosen)
                    await store.put(chosen, group(chosen, started[chosen], version))
            taken = names(await taking)
            oldest = sorted(finished, key=lambda k: (started[k], k))[: len(taken)]
            assert taken == [f"q{k}" for k in oldest]
            for k in oldest:
                assert step - started.pop(k) <= max_staleness
                finished.discard(k)
            consumed.extend(taken)

    run_virtual(main())
    assert sorted(consumed) == sorted(f"q{k}" for k in range(2 * num_prompts))


def fill(store: MemoryStore, versions: list[int], finished: list[int]) -> None:
    async def main() -> None:
        for position, version in enumerate(versions):
            store.start(position, version)
        for position in finished:
            await store.put(position, group(position, versions[position]))

    asyncio.run(main())


def endless(batch_size: int) -> Schedule:
    return Schedule(num_prompts=1000, batch_size=batch_size)


def test_a_slow_prompt_is_waited_for_only_when_it_could_be_late_otherwise() -> None:
    async def main() -> None:
        store = make_store(endless(2), max_staleness=2)
        for position, version in enumerate([0, 0, 0, 0]):
            store.start(position, version)
        for position in (1, 2, 3):
            await store.put(position, group(position, 0))
        assert names(await store.select(0)) == ["q1", "q2"]
        for position in (4, 5):
            store.start(position, 1)
            await store.put(position, group(position, 1))
        assert names(await store.select(1)) == ["q3", "q4"]
        store.start(6, 2)
        await store.put(6, group(6, 2))
        taking = asyncio.create_task(store.select(2))
        await settle()
        assert not taking.done(), "q0 is due now, whatever else is there"
        await store.put(0, group(0, 0, 1, 2))
        assert names(await taking) == ["q0", "q5"]
        stats = store.stats()
        assert (stats["staleness/max"], stats["staleness/mean"]) == (2, 1.5)

    run_virtual(main())


def test_masking_waits_for_no_one_and_masks_only_tokens_that_are_too_old() -> None:
    async def main() -> None:
        store = make_store(endless(1), max_staleness=1, over_age="mask")
        for position in range(4):
            store.start(position, 0)
        for step, position in enumerate((1, 2)):
            await store.put(position, group(position, 0))
            assert names(await store.select(step)) == [f"q{position}"]
        await store.put(0, group(0, 0, 0, 1, 2))
        await store.put(3, group(3, 0, 0))
        ((late,),) = await store.select(2)
        assert late.loss_mask.tolist() == [False, False, False, False, True, True]
        assert late.versions.tolist() == [-1, -1, 0, 0, 1, 2]
        ((hopeless,),) = await store.select(3)
        assert not hopeless.loss_mask.any()
        assert store.stats()["rollout/num_masked_tokens"] == 4

    run_virtual(main())


def test_tokens_older_than_their_slot_break_the_invariant_loudly() -> None:
    async def main() -> None:
        store = make_store(endless(1), max_staleness=0)
        store.skip_to(3)
        store.start(3, 3)
        await store.put(3, group(3, 2, 3))
        with pytest.raises(StalenessInvariantError, match="step 3 got a trajectory of q3 sampled from version 2"):
            await store.select(3)

    run_virtual(main())


def test_more_slots_than_can_be_in_time_break_the_invariant_loudly() -> None:
    async def main() -> None:
        store = make_store(endless(1), max_staleness=0)
        for position in range(2):
            store.start(position, 0)
            await store.put(position, group(position, 0))
        with pytest.raises(StalenessInvariantError, match="2 prompts must be trained by step 0, which has room for 1"):
            await store.select(0)

    run_virtual(main())


def test_select_raises_the_error_of_fail_before_and_after() -> None:
    async def main() -> None:
        store = make_store(endless(1), max_staleness=0)
        taking = asyncio.create_task(store.select(0))
        await settle()
        await store.fail(KeyError("first"))
        await store.fail(KeyError("second"))
        with pytest.raises(KeyError, match="first"):
            await taking
        with pytest.raises(KeyError, match="first"):
            await store.select(0)

    run_virtual(main())


def test_a_cancelled_select_loses_nothing() -> None:
    async def main() -> None:
        store = make_store(endless(2), max_staleness=0)
        for position in range(2):
            store.start(position, 0)
        await store.put(0, group(0, 0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(store.select(0), 1.0)
        await store.put(1, group(1, 0))
        assert names(await store.select(0)) == ["q0", "q1"]

    run_virtual(main())


def test_steps_are_taken_in_order_and_not_beyond_the_last() -> None:
    async def main() -> None:
        store = make_store(Schedule(num_prompts=2, batch_size=2, total_epochs=1), max_staleness=0)
        with pytest.raises(ValueError, match=r"take\(1\): the next step is 0 of 1"):
            await store.select(1)
        for position in range(2):
            store.start(position, 0)
            await store.put(position, group(position, 0))
        await store.select(0)
        with pytest.raises(ValueError, match=r"take\(1\): the next step is 1 of 1"):
            await store.select(1)

    run_virtual(main())


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="max_staleness=-1"):
        make_store(endless(1), max_staleness=-1)
    with pytest.raises(ValueError, match="over_age='drop'"):
        make_store(endless(1), max_staleness=1, over_age="drop")


def test_a_restored_buffer_hands_out_what_the_first_one_would_have() -> None:
    first = make_store(endless(2), max_staleness=1)
    fill(first, [0, 0, 0, 0], finished=[3, 0, 1])
    assert first.in_flight() == [2]
    restored = make_store(endless(2), max_staleness=1)
    restored.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    for store in (first, restored):
        ((one,), (two,)) = asyncio.run(store.select(0))
        assert (one.query_id, two.query_id) == ("q0", "q1")
        assert one.versions.tolist() == [-1, -1, 0]
        assert store.next_step == 1
        assert store.in_flight() == [2]


def test_a_batch_is_part_of_the_state_until_it_is_acknowledged() -> None:
    async def main() -> None:
        first = make_store(endless(1), max_staleness=1, over_age="mask")
        first.skip_to(2)
        for position in range(3):
            first.start(position, 0)
        await first.put(0, group(0, 0, 1))
        await first.put(1, group(1, 1))
        untouched = first.state_dict()
        assert names(await first.select(2)) == ["q0"]
        assert (first.stats()["rollout/num_ready"], first.stats()["rollout/num_masked_tokens"]) == (1, 1)
        held = first.state_dict()
        assert held["next_step"] == 2 and held["masked_tokens"] == 0
        assert [p for _, p, _ in held["ready"]] == [p for _, p, _ in untouched["ready"]] == [0, 1]
        restored = make_store(endless(1), max_staleness=1, over_age="mask")
        restored.load_state_dict(pickle.loads(pickle.dumps(held)))
        ((again,),) = await restored.select(2)
        assert again.loss_mask.tolist() == [False, False, False, True]
        assert restored.stats()["rollout/num_masked_tokens"] == 1
        first.acknowledge(2)
        assert first.state_dict()["next_step"] == 2, "step 2 itself is not consumed yet"
        first.acknowledge(3)
        consumed = first.state_dict()
        assert (consumed["next_step"], consumed["masked_tokens"]) == (3, 1)
        assert ([p for _, p, _ in consumed["ready"]], [p for _, p in consumed["in_flight"]]) == ([1], [2])

    run_virtual(main())


def test_selecting_the_next_batch_acknowledges_the_one_before() -> None:
    async def main() -> None:
        store = make_store(endless(1), max_staleness=1)
        for position in range(2):
            store.start(position, 0)
            await store.put(position, group(position, 0))
        for step in range(2):
            await store.select(step)
        state = store.state_dict()
        assert (state["next_step"], [p for _, p, _ in state["ready"]]) == (1, [1])

    run_virtual(main())


def test_a_bound_of_a_million_million_steps_selects_as_a_narrow_one_does() -> None:
    async def main() -> None:
        store = make_store(endless(2), max_staleness=10**12)
        for position in range(3):
            store.start(position, 0)
        for position in (2, 1):
            await store.put(position, group(position, 0))
        assert names(await store.select(0)) == ["q1", "q2"]

    run_virtual(main())


def test_the_count_of_masked_tokens_continues_after_a_restart_and_leaves_out_what_was_not_trained() -> None:
    async def main() -> None:
        first = make_store(endless(1), max_staleness=0, over_age="mask")
        (answer,) = group(0, 0, 0, 0)
        answer.loss_mask[3] = False  # between two turns
        for position in range(3):
            first.start(position, 0)
        await first.put(2, group(2, 0))
        await first.select(0)
        await first.put(0, [answer])
        ((masked,),) = await first.select(1)
        assert not masked.loss_mask.any()
        assert first.stats()["rollout/num_masked_tokens"] == 2
        first.acknowledge(2)
        restored = make_store(endless(1), max_staleness=0, over_age="mask")
        restored.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
        await restored.put(1, group(1, 0, 0, 0, 2))
        await restored.select(2)
        assert restored.stats()["rollout/num_masked_tokens"] == 5

    run_virtual(main())


def test_ages_are_averaged_over_trajectories_whatever_their_groups() -> None:
    groups = [group(0, 3) + group(0, 1) + group(0, 1), group(1, 3)]
    assert age_metrics(groups, 3, 2) == {"staleness/mean": 1.0, "staleness/max": 2.0}


def test_a_bound_that_is_no_bound_costs_nothing() -> None:
    assert age_metrics([group(0, 18), group(1, 15)], 18, 10**12) == {"staleness/mean": 1.5, "staleness/max": 3.0}
