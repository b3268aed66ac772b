"""What every experience store promises: the order of leases, the staleness bound, and what survives a process."""

import asyncio
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations, count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.data.rollout_batch import pack_trajectories
from helpers.postgres import PostgresServer
from helpers.stores import Stores, begin, episode, fill, finish, names, path_of, tags
from helpers.virtual_clock import run_virtual
from rollout.experience import (
    Episode,
    Event,
    EveryEpisode,
    Experience,
    ExploreError,
    Lessee,
    LesseeError,
    MemoryExperience,
    OverAge,
    Patience,
    Schedule,
    SQLiteExperience,
    StalenessAdmission,
    StalenessError,
    StoreError,
    make_rules,
)
from rollout.experience.lessee import mask_over_age
from rollout.experience.serial import SchemaError, dumps, episode_from_plain, episode_to_plain, loads
from rollout.experience.stores import sql
from rollout.experience.stores.files import FileExperience
from rollout.experience.stores.postgres import PostgresExperience
from rollout.trajectories import turns
from rollout.types import Completion, Trajectory


def trainer(store: Experience, schedule: Schedule, max_staleness: int, *, over_age: OverAge = "wait") -> Lessee:
    rules = make_rules(
        num_prompts=schedule.num_prompts, batch_size=schedule.batch_size, max_staleness=max_staleness,
        over_age=over_age, num_epochs=schedule.total_epochs,
    )  # fmt: skip
    return Lessee(store, rules)


async def a_moment() -> None:
    """Longer than a store takes to notice a change."""
    await asyncio.sleep(0.1)


def endless(batch_size: int) -> Schedule:
    return Schedule(num_prompts=1000, batch_size=batch_size)


def due_by_brute_force(
    schedule: Schedule, max_staleness: int, started: dict[int, int], finished: set[int], step: int
) -> bool:
    """Is there a batch of ready episodes that leaves behind only what can still be in time?"""
    size = schedule.batch_of(step)

    def in_time(left: list[int]) -> bool:
        deadlines = [started[number] + max_staleness for number in left]
        return all(
            sum(deadline <= last for deadline in deadlines) <= sum(map(schedule.batch_of, range(step + 1, last + 1)))
            for last in range(step, max(deadlines, default=step) + 1)
        )

    return any(in_time([k for k in started if k not in batch]) for batch in combinations(sorted(finished), size))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(max_staleness=st.integers(0, 3), batch_size=st.integers(1, 3), num_prompts=st.integers(1, 6), data=st.data())
def test_a_lease_waits_exactly_as_long_as_it_must_and_the_bound_never_breaks(
    stores: Stores, max_staleness: int, batch_size: int, num_prompts: int, data: st.DataObject
) -> None:
    """Episodes begin late, end in any order, and begin again; the weights lag behind the steps by up to one."""
    if stores.kind == "postgres":
        pytest.skip("its statements are those of sqlite, and thousands of leases take a minute")
    schedule = Schedule(num_prompts=num_prompts, batch_size=batch_size, total_epochs=2)
    admission = StalenessAdmission(schedule, max_staleness)
    num_steps = 2 * schedule.steps_per_epoch
    consumed: list[str] = []

    async def main() -> None:
        store = stores.new()
        lessee = trainer(store, schedule, max_staleness)
        started: dict[int, int] = {}
        finished: set[int] = set()
        version, number = 0, 0
        for step in range(num_steps):
            taking = asyncio.create_task(lessee.take(step))
            while True:
                await a_moment()
                assert taking.done() == due_by_brute_force(schedule, max_staleness, started, finished, step)
                if taking.done():
                    break
                # What has begun and is not trained may be of this step and those up to version + max_staleness.
                room = sum(map(schedule.batch_of, range(step, version + max_staleness + 1)))
                running = sorted(started.keys() - finished)
                choices = ["finish"] * bool(running) + ["restart"] * bool(running)
                choices += ["start"] * (len(started) < room) + ["push"] * (version < step)
                choice = data.draw(st.sampled_from(choices))
                if choice == "push":
                    version += 1
                elif choice == "start":
                    started[number] = version
                    assert store.open(tags(number, version), admission) == "open"
                    number += 1
                    assert store.open(tags(99, version), _Fewer(admission, len(started), room)) == "full"
                else:
                    chosen = data.draw(st.sampled_from(running))
                    if choice == "restart":
                        started[chosen] = version
                        store.reopen(f"q{chosen}", version)
                        continue
                    finished.add(chosen)
                    finish(store, chosen, started[chosen], version)
            taken = names(await taking)
            oldest = sorted(finished, key=lambda k: (started[k], k))[: len(taken)]
            assert taken == [f"q{k}" for k in oldest]
            for k in oldest:
                assert step - started.pop(k) <= max_staleness
                finished.discard(k)
            consumed.extend(taken)
        store.close()

    run_virtual(main())
    assert sorted(consumed) == sorted(f"q{k}" for k in range(2 * num_prompts))


class _Fewer:
    """Refuses once what the real admission was asked about is compared with the room."""

    def __init__(self, admission: StalenessAdmission, outstanding: int, room: int) -> None:
        self._admission, self._outstanding, self._room = admission, outstanding, room

    def admits(self, num_outstanding: int, *, next_step: int, version: int) -> bool:
        assert num_outstanding == self._outstanding
        asked = self._admission.admits(num_outstanding, next_step=next_step, version=version)
        assert asked == (self._outstanding < self._room)
        return False


@pytest.mark.virtual_clock
async def test_a_slow_prompt_is_waited_for_only_when_it_could_be_late_otherwise(stores: Stores) -> None:
    store = stores.new()
    lessee = trainer(store, endless(2), 2)
    fill(store, 4, finished=False)
    for number in (1, 2, 3):
        finish(store, number, 0)
    assert names(await lessee.take(0)) == ["q1", "q2"]
    for number in (4, 5):
        begin(store, number, 1)
        finish(store, number, 1)
    assert names(await lessee.take(1)) == ["q3", "q4"]
    begin(store, 6, 2)
    finish(store, 6, 2)
    taking = asyncio.create_task(lessee.take(2))
    await a_moment()
    assert not taking.done(), "q0 is due now, whatever else is there"
    finish(store, 0, 0, 1, 2)
    assert names(await taking) == ["q0", "q5"]
    stats = lessee.stats()
    assert (stats["staleness/max"], stats["staleness/mean"]) == (2, 1.5)


@pytest.mark.virtual_clock
async def test_masking_waits_for_no_one_and_masks_only_tokens_that_are_too_old(stores: Stores) -> None:
    store = stores.new()
    lessee = trainer(store, endless(1), 1, over_age="mask")
    fill(store, 4, finished=False)
    for step, number in enumerate((1, 2)):
        finish(store, number, 0)
        assert names(await lessee.take(step)) == [f"q{number}"]
    finish(store, 0, 0, 0, 1, 2)
    finish(store, 3, 0, 0)
    ((late,),) = [e.trajectories for e in await lessee.take(2)]
    assert late.loss_mask.tolist() == [False, False, False, False, True, True]
    assert late.versions.tolist() == [-1, -1, 0, 0, 1, 2]
    ((hopeless,),) = [e.trajectories for e in await lessee.take(3)]
    assert not hopeless.loss_mask.any()
    assert lessee.stats()["rollout/num_masked_tokens"] == 4


def test_turns_that_are_masked_leave_the_others_with_their_rewards() -> None:
    mask = np.array([False, True, True, False, True, False, True])
    versions = np.array([-1, 0, 0, -1, 1, -1, 2], np.int32)
    t = Trajectory(
        query_id="q", token_ids=np.arange(7, dtype=np.int32), loss_mask=mask, versions=versions, reward=6.0,
        rollout_logprobs=np.zeros(7, np.float32), finish_reason="stop", turn_rewards=[1.0, 2.0, 3.0],
        turn_states=["a", "b", None],
    )  # fmt: skip
    for oldest, rewards, states in ((0, [1, 2, 3], ["a", "b", None]), (1, [3, 3], ["b", None]), (3, [], [])):
        masked, _ = mask_over_age(t, oldest)
        assert (masked.turn_rewards, masked.turn_states) == (rewards, states)
        batch = pack_trajectories([[masked]], ["q"])
        assert batch.turn_rewards is not None and len(batch.turn_rewards) == len(turns(masked.loss_mask))


@pytest.mark.virtual_clock
async def test_tokens_older_than_their_episode_break_the_invariant_loudly(stores: Stores) -> None:
    store = stores.new()
    lessee = trainer(store, endless(1), 0)
    store.begin_at(3, num_opened=3)
    begin(store, 3, 3)
    finish(store, 3, 2, 3)
    with pytest.raises(StalenessError, match="step 3 got a trajectory of q3 sampled from version 2"):
        await lessee.take(3)


@pytest.mark.virtual_clock
async def test_a_lease_raises_the_error_of_fail_before_and_after(stores: Stores) -> None:
    store = stores.new()
    lessee = trainer(store, endless(1), 0)
    taking = asyncio.create_task(lessee.take(0))
    await a_moment()
    store.fail(KeyError("first"))
    store.fail(KeyError("second"))
    with pytest.raises((KeyError, ExploreError), match="first"):
        await taking
    with pytest.raises((KeyError, ExploreError), match="first"):
        await lessee.take(0)


@pytest.mark.virtual_clock
async def test_a_cancelled_lease_loses_nothing(stores: Stores) -> None:
    store = stores.new()
    lessee = trainer(store, endless(2), 0)
    fill(store, 2, finished=False)
    finish(store, 0, 0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(lessee.take(0), 1.0)
    finish(store, 1, 0)
    assert names(await lessee.take(0)) == ["q0", "q1"]


@pytest.mark.virtual_clock
async def test_steps_are_leased_in_order_and_not_beyond_the_last(stores: Stores) -> None:
    store = stores.new()
    with pytest.raises(ValueError, match=r"lease\(1\): the next step is 0"):
        await trainer(store, endless(2), 0).take(1)
    lessee = trainer(store, Schedule(num_prompts=2, batch_size=2, total_epochs=1), 0)
    fill(store, 2)
    await lessee.take(0)
    with pytest.raises(ValueError, match=r"take\(1\): the run has 1 steps"):
        await lessee.take(1)


def test_a_continued_store_leases_what_the_first_one_would_have(stores: Stores) -> None:
    async def leased(store: Experience) -> list[tuple[str, list[int]]]:
        taken = await trainer(store, endless(2), 1).take(0)
        assert [tags.id for tags in store.in_flight()] == ["q2"]
        return [(e.tags.id, e.trajectories[0].versions.tolist()) for e in taken]

    def filled() -> Experience:
        store = stores.new()
        fill(store, 4, finished=False)
        for number in (3, 0, 1):
            finish(store, number, 0)
        return store

    expected = [("q0", [-1, -1, 0]), ("q1", [-1, -1, 0])]
    assert run_virtual(leased(filled())) == expected
    assert run_virtual(leased(stores.continued(filled()))) == expected


@pytest.mark.virtual_clock
async def test_a_lease_is_returned_with_what_was_dropped_before_it_until_it_is_acknowledged(stores: Stores) -> None:
    store = stores.new()
    fill(store, 5, finished=False)
    for number in (0, 1, 2):
        store.put(episode(number, 0), lambda tags, ahead: tags.id == "q1")
    rules = make_rules(num_prompts=9, batch_size=1, max_staleness=9, dynamic_sampling_limit=1)
    first = await store.lease(rules.selection, 0, "a")
    assert (first.ids, [t.id for t in first.dropped]) == (["q0"], ["q1"])
    store.ack(first)
    store.drop("q3")
    second = await store.lease(rules.selection, 1, "a")
    assert (second.ids, [t.fate for t in second.dropped]) == (["q2"], ["skipped"])
    assert await store.lease(rules.selection, 1, "a") == second, "leased twice"
    again = stores.continued(store)
    assert (again.status().num_opened, [t.id for t in again.in_flight()]) == (5, ["q4"])
    third = await again.lease(rules.selection, 1, "b")
    assert (third.ids, [t.id for t in third.dropped]) == (["q2"], ["q3"])
    again.ack(third)
    again.ack(third)
    finish(again, 4, 1)
    assert (await again.lease(rules.selection, 2, "b")).ids == ["q4"]


@pytest.mark.virtual_clock
async def test_taking_the_next_batch_acknowledges_the_one_before(stores: Stores) -> None:
    store = stores.new()
    lessee = trainer(store, endless(1), 1)
    fill(store, 2)
    for step in range(2):
        await lessee.take(step)
    again = stores.continued(store)
    lessee = trainer(again, endless(1), 1)
    assert names(await lessee.take(1)) == ["q1"]
    with pytest.raises(KeyError):
        again.values(["q0"])


@pytest.mark.virtual_clock
async def test_a_value_that_is_put_twice_or_too_late_changes_nothing(stores: Stores) -> None:
    store = stores.new()
    lessee = trainer(store, endless(1), 3)
    fill(store, 2, finished=False)
    finish(store, 0, 0)
    finish(store, 0, 0, 0, 0)
    assert store.status().num_ready == 1
    (taken,) = await lessee.take(0)
    assert taken.trajectories[0].versions.tolist() == [-1, -1, 0]
    finish(store, 0, 0)
    lessee.trained(1)
    finish(store, 0, 0)
    finish(store, 7, 0)
    store.drop("q0")
    assert (store.status().num_ready, store.status().num_outstanding) == (0, 1)
    assert store.open(tags(1), EveryEpisode()) == "known" and store.status().num_opened == 2, "opened before"


@pytest.mark.virtual_clock
async def test_a_second_trainer_is_refused_by_name(stores: Stores) -> None:
    store = stores.new()
    rules = make_rules(num_prompts=9, batch_size=1, max_staleness=9)
    fill(store, 2)
    await store.lease(rules.selection, 0, "first")
    with pytest.raises(LesseeError, match="'second' cannot lease: 'first'"):
        await store.lease(rules.selection, 0, "second")
    if stores.kind == "sqlite":  # another process has a connection of its own
        other = SQLiteExperience(store._path)
        with pytest.raises(LesseeError, match=rf"'third' cannot lease: 'first' \(process {os.getpid()}\)"):
            await other.lease(rules.selection, 0, "third")
        store.close()
        assert (await other.lease(rules.selection, 0, "third")).ids == ["q0"]


def test_episodes_in_flight_are_adopted_once_their_process_has_ended(tmp_path: Path) -> None:
    """No prompt is sampled by two processes, and none waits for a process that is gone."""
    path = tmp_path / "e.db"
    child = os.fork()
    if not child:  # a process that is killed while it samples
        store = SQLiteExperience(path)
        begin(store, 0, 0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    first, second = SQLiteExperience(path), SQLiteExperience(path)
    begin(first, 1, 0)
    assert second.open(tags(1), EveryEpisode()) == "known"
    begin(second, 2, 0)
    assert [t.id for t in first.adopt()] == ["q0"]
    assert first.adopt() == second.adopt() == []
    first.close()
    assert [t.id for t in second.adopt()] == ["q0", "q1"]
    assert [t.id for t in second.in_flight()] == ["q0", "q1", "q2"]
    second.close()


async def test_leases_are_kept_until_a_checkpoint_with_their_steps_is_on_the_disk(tmp_path: Path) -> None:
    rules = make_rules(num_prompts=9, batch_size=1, max_staleness=9)

    store = SQLiteExperience(tmp_path / "e.db")
    fill(store, 5)
    lessee = Lessee(store, rules, until_saved=True)
    for step in range(3):
        await lessee.take(step)
        lessee.trained(step + 1)
        lessee.state_dict()  # of a checkpoint of step + 1; the one before is on the disk
    assert [t.fate for t in store.tags()] == ["trained", "trained", "leased", "ready", "ready"]
    store.close()
    store = SQLiteExperience(tmp_path / "e.db")  # the checkpoint of step 3 was damaged: the run continues at 2
    assert names(await Lessee(store, rules, until_saved=True).take(2)) == ["q2"]
    store.close()


def test_a_journal_survives_until_its_episode_ends_or_begins_again(stores: Stores) -> None:
    completion = Completion(
        token_ids=np.arange(3, dtype=np.int32), logprobs=np.full(3, -1.5, np.float32),
        versions=np.zeros(3, np.int32), finish_reason="abort", routed_experts=np.ones((4, 2, 1), np.int16),
    )  # fmt: skip
    store = stores.new()
    for number in range(3):
        begin(store, number, 0)
        store.journal(f"q{number}", Event(key="a", asked="x", value={"found": [1, "two"], "at": np.arange(2)}))
        store.journal(f"q{number}", Event(key="b", asked="y", value=None))
        store.journal(f"q{number}", Event(key="b", asked="y", value=completion))
    store.reopen("q1", 1)
    finish(store, 2, 0)
    store = stores.continued(store)
    found, sampled = store.events("q0")
    assert (found.key, found.asked, found.value["found"], found.value["at"].tolist()) == ("a", "x", [1, "two"], [0, 1])
    for name, value in vars(completion).items():
        assert np.array_equal(getattr(sampled.value, name), value)
    assert store.events("q1") == []


def test_events_of_one_call_are_written_together_or_not_at_all(stores: Stores) -> None:
    if not stores.are_durable:
        pytest.skip("a store in memory writes nothing")
    store = stores.new()
    begin(store, 0, 0)
    with pytest.raises(TypeError, match="cannot be saved"):
        store.journal("q0", Event(key="a", asked="", value=1), Event(key="b", asked="", value=object()))
    assert store.events("q0") == []
    store.journal("q0", Event(key="a", asked="", value=1), Event(key="b", asked="", value=2))
    assert [event.key for event in stores.continued(store).events("q0")] == ["a", "b"]


async def test_sampled_tokens_are_written_after_a_moment_or_with_what_needs_them(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not stores.are_durable:
        pytest.skip("a store in memory writes nothing")
    sampled = Completion(
        token_ids=np.arange(3, dtype=np.int32), logprobs=np.full(3, -1.5, np.float32), versions=np.zeros(3, np.int32),
        finish_reason="stop",
    )  # fmt: skip
    monkeypatch.setattr(sql, "_HELD_SECONDS", 0.1)
    store = stores.new()
    other = type(store)(path_of(store))  # of another process
    fill(store, 4, finished=False)

    def keys(of: Experience, number: int) -> list[str]:
        return [event.key for event in of.events(f"q{number}")]

    store.journal("q0", Event(key="b", asked="", value=sampled))
    assert (keys(store, 0), keys(other, 0)) == (["b"], [])
    store.journal("q1", Event(key="tool", asked="", value=1))
    assert (keys(other, 0), keys(other, 1)) == (["b"], ["tool"])
    store.journal("q0", Event(key="a", asked="", value=sampled))
    store.journal("q3", Event(key="a", asked="", value=sampled))
    assert keys(store, 0) == ["a", "b"]
    await asyncio.sleep(0.3)  # its timers run first: they are held for twice 0.1 s at most
    assert (keys(other, 0), keys(other, 3)) == (["a", "b"], ["a"])
    other.reopen("q3", 1)
    await asyncio.sleep(0.3)
    assert keys(store, 3) == []  # what is written is not written again
    store.journal("q0", Event(key="c", asked="", value=sampled))
    store.state_dict()
    assert keys(other, 0) == ["a", "b", "c"]
    for number in range(3):
        store.journal(f"q{number}", Event(key="d", asked="", value=sampled))
    finish(store, 0, 0)
    store.reopen("q1", 1)
    store.close()
    assert [keys(other, number) for number in range(3)] == [[], [], ["d"]]
    other.close()


def test_an_episode_is_read_as_it_was_written_and_one_of_another_release_is_refused() -> None:
    made = episode(3, 1, 2, rewards=(0.5, -1.0))
    experts = np.arange(8, dtype=np.int16).reshape(4, 2, 1)
    replayed = [
        Trajectory(**(vars(t) | {"routed_experts": experts, "metrics": {"turns": 2}})) for t in made.trajectories
    ]
    plain = episode_to_plain(Episode(tags=made.tags, trajectories=replayed))
    read = episode_from_plain(loads(dumps(plain)))
    assert read.tags == made.tags
    for got, expected in zip(read.trajectories, replayed, strict=True):
        for name, value in vars(expected).items():
            assert np.array_equal(getattr(got, name), value), name
            assert getattr(getattr(got, name), "dtype", None) == getattr(value, "dtype", None)
    with pytest.raises(SchemaError, match="serial form 99"):
        episode_from_plain(plain | {"schema": 99})
    with pytest.raises(SchemaError, match="serial form None"):
        MemoryExperience().load_state_dict({"next_step": 0})


def test_a_file_of_another_release_is_refused(tmp_path: Path) -> None:
    SQLiteExperience(tmp_path / "store.db").close()
    with sqlite3.connect(tmp_path / "store.db") as db:
        db.execute("UPDATE meta SET value = 0 WHERE key = 'schema'")
    with pytest.raises(SchemaError, match="serial form 0"):
        SQLiteExperience(tmp_path / "store.db")


@pytest.mark.virtual_clock
async def test_a_bound_of_a_million_million_steps_selects_as_a_narrow_one_does(stores: Stores) -> None:
    store = stores.new()
    fill(store, 3, finished=False)
    for number in (2, 1):
        finish(store, number, 0)
    assert names(await trainer(store, endless(2), 10**12).take(0)) == ["q1", "q2"]


NUM_KILLED, STEPS_KILLED = 4, 2


def sample_and_train(path: Path, before_statement: Callable[[], None] = lambda: None) -> None:
    """Sample four prompts and train on two a step, from wherever an earlier process was killed. The file beside the
    store is the trainer's checkpoint: one line a step, written as a whole before the step is acknowledged."""

    async def main() -> None:
        store = SQLiteExperience(path)
        store._db.set_trace_callback(lambda statement: before_statement())
        rules = make_rules(num_prompts=NUM_KILLED, batch_size=2, max_staleness=0, num_epochs=1)
        checkpoint = path.with_suffix(".trained")
        steps = checkpoint.read_text().splitlines() if checkpoint.exists() else []
        for step in range(len(steps), STEPS_KILLED):
            while store.open(tags(store.status().num_opened, step), rules.admission) == "open":
                pass
            for open_tags in store.in_flight():
                number = int(open_tags.row[1:])
                store.journal(open_tags.id, Event(key="a", asked="", value=number))
                assert [event.value for event in store.events(open_tags.id)] == [number]
                finish(store, number, step)
            lease = await store.lease(rules.selection, step, "trainer")
            assert [len(e.trajectories[0].token_ids) for e in store.values(lease.ids)] == [3, 3]
            steps.append(" ".join(lease.ids))
            written = checkpoint.with_suffix(".new")
            written.write_text("".join(f"{line}\n" for line in steps))
            written.rename(checkpoint)
            store.ack(lease)
            store.prune(0)
        store.close()

    asyncio.run(main())


def killed_before(statement: int, path: Path) -> bool:
    """Whether the process was killed before its n-th statement; False: it had none of that number."""
    child = os.fork()
    if not child:
        numbers = count()
        try:
            sample_and_train(path, lambda: os.kill(os.getpid(), signal.SIGKILL) if next(numbers) == statement else None)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - nothing of the parent may run here
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.slow
@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_process_that_is_killed_between_any_two_statements_loses_and_repeats_nothing(stride: int, tmp_path) -> None:
    for statement in count(step=stride):
        path = tmp_path / f"{statement}.db"
        if not killed_before(statement, path):
            break
        killed_before(statement // 2, path)  # and the one after it, elsewhere
        sample_and_train(path)
        trained = path.with_suffix(".trained").read_text().split()
        assert sorted(trained) == [f"q{i}" for i in range(NUM_KILLED)], statement
        with sqlite3.connect(path) as db:
            tables = "episodes LEFT JOIN trajectories USING (number)"
            fates = db.execute(f"SELECT id, fate, value IS NULL FROM {tables} ORDER BY number").fetchall()
            assert fates[:2] == [(f"q{i}", "trained", 1) for i in range(2)], statement
            assert db.execute("SELECT count(*) FROM journals").fetchone() == (0,)
    assert statement > 100


@pytest.mark.nightly
def test_many_episodes_pass_through_in_time_that_grows_no_faster_than_their_number(stores: Stores) -> None:
    """What is kept of trained episodes makes no call slower."""
    num_episodes, batch_size = 100_000, 1000
    rules = make_rules(num_prompts=num_episodes, batch_size=batch_size, max_staleness=1, num_epochs=1)
    value = episode(0, 0)

    async def main() -> list[float]:
        store, seconds, numbers = stores.new(), [], count()
        for step in range(100):
            began = time.process_time()
            number = next(numbers)
            while store.open(tags(number, step), rules.admission) == "open":
                store.put(Episode(tags=replace(value.tags, id=f"q{number}"), trajectories=value.trajectories))
                number = next(numbers)
            numbers = count(number)
            lease = await store.lease(rules.selection, step, "trainer")
            store.ack(lease)
            seconds.append(time.process_time() - began)
        assert store.status().num_opened == num_episodes and not store.status().num_outstanding
        return seconds

    seconds = asyncio.run(main())
    assert sum(seconds[-20:]) < 3 * sum(seconds[10:30])


async def test_a_step_that_has_waited_trains_what_is_ready_and_only_what_would_be_too_old_is_late(stores) -> None:
    """Batches of 3, bound 1: of the episodes of version 0, steps 0 and 1 can train six."""
    store, rules = stores.new(), make_rules(num_prompts=99, batch_size=3, max_staleness=1)
    lessee = Lessee(store, rules, patience=partial(Patience, seconds=0.05))
    fill(store, 6, finished=False)
    finish(store, 4, 0)

    assert names(await lessee.take(0)) == ["q4"]
    assert lessee.stats()["rollout/num_late"] == 2.0 and lessee.stats()["rollout/num_missing"] == 2.0
    for number in (0, 1, 2, 3, 5):
        finish(store, number, 0)  # the first two are late: no effect
    assert names(await lessee.take(1)) == ["q2", "q3", "q5"]
    lessee.trained(2)
    begin(store, 6, version=1)
    waiting = asyncio.ensure_future(lessee.take(2))
    await asyncio.sleep(0.2)
    assert not waiting.done(), "a step trains at least one episode"
    finish(store, 6, 1)
    assert names(await waiting) == ["q6"]
    assert store.status().num_outstanding == 0


async def test_a_step_trains_without_its_slowest_prompts_and_the_bias_of_late_ones_is_known(stores: Stores) -> None:
    """Batches of 4, bound 0: a step may miss a quarter of its prompts, which are late then."""
    store, rules = stores.new(), make_rules(num_prompts=99, batch_size=4, max_staleness=0)
    lessee = Lessee(store, rules, patience=partial(Patience, ratio=0.25, wait_seconds=0.05))
    fill(store, 4, finished=False)

    waiting = asyncio.ensure_future(lessee.take(0))
    finish(store, 0, 0)
    finish(store, 1, 0, 0)
    await asyncio.sleep(0.2)
    assert not waiting.done(), "half of the prompts are not enough"
    part = Completion(
        token_ids=np.zeros(9, np.int32), logprobs=np.zeros(9, np.float32), versions=np.zeros(9, np.int32),
        finish_reason="abort",
    )  # fmt: skip
    store.journal("q3", Event(key="0", asked="a", value=part))
    finish(store, 2, 0, 0, 0)
    assert names(await waiting) == ["q0", "q1", "q2"]
    stats = lessee.stats()
    assert (stats["rollout/num_late"], stats["rollout/num_missing"]) == (1.0, 1.0)
    assert stats["rollout/length_bias"] == pytest.approx(2 / ((1 + 2 + 3 + 9) / 4)), "what it has sampled"
    (late,) = [tags for tags in store.tags() if tags.fate == "late"] if stores.are_durable else [None]
    assert late is None or late.lengths == [9]


def test_an_episode_that_takes_too_long_is_late_and_the_bias_counts_it(stores: Stores) -> None:
    store, rules = stores.new(), make_rules(num_prompts=99, batch_size=2, max_staleness=0)
    lessee = Lessee(store, rules, counts_late=True)
    fill(store, 2, finished=False)
    finish(store, 0, 0)
    store.drop("q1", reason="slow")
    store.drop("q0", reason="slow")  # it is ready: no effect
    begin(store, 2, version=0)
    finish(store, 2, 0, 0, 0)
    assert names(asyncio.run(lessee.take(0))) == ["q0", "q2"]
    stats = lessee.stats()
    assert (stats["dropped/slow"], stats["rollout/num_late"], stats["rollout/num_missing"]) == (1.0, 1.0, 0.0)
    assert stats["rollout/length_bias"] == pytest.approx(2 / ((1 + 3 + 3) / 3)), "as long as the longest, at least"
    (late,) = [tags for tags in store.tags() if tags.fate == "late"] if stores.are_durable else [None]
    assert late is None or late.reason == "slow"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=12), st.integers(0, 2), st.integers(1, 4))
def test_a_partial_lease_keeps_the_bound_and_drops_no_more_than_it_needs(begun, max_staleness, batch_size) -> None:
    """Episodes as admission lets them begin at step 2, each with whether it is finished."""
    schedule = Schedule(num_prompts=1000, batch_size=batch_size)
    store, admission = MemoryExperience(), StalenessAdmission(schedule, max_staleness)
    store.begin_at(2, num_opened=0)
    kept: dict[int, tuple[int, bool]] = {}
    for number, (version, finished) in enumerate(begun):
        if store.open(tags(number, version), admission) == "open":
            kept[number] = version, finished
            if finished:
                finish(store, number, version)
    selection = make_rules(num_prompts=1000, batch_size=batch_size, max_staleness=max_staleness).selection
    ids, late = selection.partial(store, 2)

    def broken(gone: set[str]) -> bool:
        left = [version + max_staleness for number, (version, _) in kept.items() if f"q{number}" not in gone]
        return any(
            sum(deadline <= d for deadline in left) > schedule.consumed_before(d + 1) - schedule.consumed_before(3)
            for d in range(2, 8)
        )

    assert len(ids) == min(batch_size, sum(finished for _, finished in kept.values()))
    if ids:
        assert not broken({*ids, *late})
        assert not late or broken({*ids, *late[:-1]})


def test_a_dead_server_is_one_error_and_nothing_is_lost_when_it_is_started_again(server: PostgresServer) -> None:
    address = server.database()
    store = PostgresExperience(address)
    begin(store, 0, version=0)
    finish(store, 0, 0)
    begin(store, 1, version=0)
    server.stop()
    try:
        with pytest.raises(StoreError, match=r"experience.path=127.0.0.1:\d+/postgres\?.*: .*start the server again"):
            begin(store, 2, version=0)
    finally:
        server.start()
    again = PostgresExperience(address)
    assert [(t.id, t.fate) for t in again.tags()] == [("q0", "ready"), ("q1", "open")]
    assert [t.id for t in again.adopt()] == ["q1"], "locks end with their connections"
    assert names(again.values(["q0"])) == ["q0"]
    again.close()


def test_a_second_trainer_is_refused_by_a_server_until_the_first_has_ended(server: PostgresServer) -> None:
    address = server.database()
    first, second = PostgresExperience(address), PostgresExperience(address)
    first.enroll("run/first")
    with pytest.raises(LesseeError, match="'run/second' cannot lease: 'run/first'"):
        second.enroll("run/second")
    first.close()
    while second.status().lessee != "run/second":  # the server notices the end of a connection a moment later
        with suppress(LesseeError):
            second.enroll("run/second")
    second.close()


def test_a_server_that_is_not_there_and_a_file_that_is_no_store_are_one_error(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StoreError, match="check the address"):
        PostgresExperience("postgresql://slipstream@no-such-host.invalid/store")
    (tmp_path / "text.db").write_text("no database" * 1000)
    with pytest.raises(StoreError, match=r"text.db: file is not a database; name another file"):
        SQLiteExperience(tmp_path / "text.db")


def test_a_full_disk_is_one_error_and_what_was_stored_stays(tmp_path: Path) -> None:
    store = SQLiteExperience(tmp_path / "e.db")
    begin(store, 0, version=0)
    (pages,) = store._execute("PRAGMA page_count").fetchone()
    store._execute(f"PRAGMA max_page_count={pages}")  # what SQLite reports of a full disk
    with pytest.raises(StoreError, match=r"e.db: database or disk is full; free space"):
        for number in range(1, 10_000):
            begin(store, number, version=0)
    kept = [t.id for t in store.tags()]
    store.close()
    again = SQLiteExperience(tmp_path / "e.db")
    assert [t.id for t in again.tags()] == kept and again.status().num_opened == len(kept)
    again.close()


async def test_a_step_writes_its_tokens_once(tmp_path: Path) -> None:
    """As the size of the log of what is written shows, which nothing else reads here."""
    path = tmp_path / "e.db"
    store = SQLiteExperience(path)
    begin(store, 0, version=0)
    finish(store, 0, *[0] * 100_000)
    written = sqlite3.connect(path)
    written.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    rules = make_rules(num_prompts=1, batch_size=1, max_staleness=0, num_epochs=1)
    store.ack(await store.lease(rules.selection, 0, "a"))
    assert path.stat().st_size > 1_000_000 > path.with_name("e.db-wal").stat().st_size > 0
    assert store.values(["q0"])[0].trajectories[0].token_ids.size > 100_000
    store.close()


def test_a_store_that_another_process_keeps_locked_is_one_error_and_loses_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("rollout.experience.stores.sqlite._BUSY_SECONDS", 0.2)
    store = SQLiteExperience(tmp_path / "e.db")
    begin(store, 0, version=0)
    connects = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); "
    keeps = "db.execute('BEGIN IMMEDIATE'); print(flush=True); input()"
    words = [sys.executable, "-c", connects + keeps, str(tmp_path / "e.db")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "\n"
        for call in (lambda: finish(store, 0, 0), lambda: SQLiteExperience(tmp_path / "e.db")):
            with pytest.raises(
                StoreError, match=r"e.db: database is locked; another process has kept it for 0.2 s; end"
            ):
                call()
        assert [t.fate for t in store.tags()] == ["open"]  # readers do not wait
        other.communicate("\n")
    finish(store, 0, 0)
    assert [t.fate for t in store.tags()] == ["ready"]
    store.close()


def test_files_keep_every_episode_once_and_refuse_a_trainer(tmp_path: Path) -> None:
    rules = make_rules(num_prompts=3, batch_size=1, max_staleness=0, num_epochs=1)
    store = FileExperience(tmp_path / "episodes")
    assert [store.open(tags(number), rules.admission) for number in range(4)] == ["open", "open", "open", "full"]
    finish(store, 1, 0)
    with pytest.raises(LesseeError, match="write sqlite"):
        store.enroll("trainer")
    store.close()
    again = FileExperience(tmp_path / "episodes")
    assert again.open(tags(1), rules.admission) == "known" and again.open(tags(0), rules.admission) == "open"
    finish(again, 0, 0)
    again.close()
    assert sorted(t.id for t in FileExperience(tmp_path / "episodes").tags()) == ["q0", "q1"]


def test_an_episode_that_is_sampled_again_counts_once(stores: Stores) -> None:
    store = stores.new()
    for number, reward in ((0, 1.0), (1, 0.5)):
        begin(store, number, 0)
        store.put(episode(number, 0, rewards=(reward,)))
    assert store.success("") == {"q0": (1, 1.0), "q1": (1, 0.5)}
    store.resample(0)
    assert store.success("") == {}
    store.put(episode(1, 0, rewards=(0.25,)))
    assert store.success("") == {"q1": (1, 0.25)}
    assert stores.continued(store).success("") == {"q1": (1, 0.25)}


@pytest.mark.virtual_clock
async def test_what_a_trainer_that_is_gone_leased_is_sampled_again_too(stores: Stores) -> None:
    store = stores.new()
    fill(store, 3)
    lessee = trainer(store, endless(1), 2)
    for step in range(2):  # the second one is not acknowledged
        await lessee.take(step)
    again = stores.continued(store)
    again.enroll("trainer")
    again.resample(1)
    assert [tags.id for tags in again.in_flight()] == ["q1", "q2"]
    again.put(episode(1, 1, rewards=(0.5,)))
    (taken,) = await trainer(again, endless(1), 2).take(1)
    assert (taken.tags.id, [t.reward for t in taken.trajectories]) == ("q1", [0.5])


def test_files_sample_again_what_a_kill_ended(tmp_path: Path) -> None:
    rules = make_rules(num_prompts=3, batch_size=1, max_staleness=0, num_epochs=1)
    store = FileExperience(tmp_path)
    for number in range(3):
        store.open(tags(number), rules.admission)
    finish(store, 1, 0)
    store.close()
    again, beside = FileExperience(tmp_path), FileExperience(tmp_path)
    stream = range(again.status().num_opened, 4)  # as a producer goes through it
    assert [again.open(tags(number), rules.admission) for number in stream] == ["open", "known", "open", "full"]
    assert len(list(tmp_path.iterdir())) == 1, "a process that stores nothing has no file"
    assert beside.open(tags(2), rules.admission) == "open"
    for one in (again, beside):
        finish(one, 2, 0)
        one.close()
    assert len(list(tmp_path.iterdir())) == 3, "each of the others has one of its own"


@pytest.mark.virtual_clock
async def test_more_episodes_than_can_be_in_time_break_the_invariant_loudly(stores: Stores) -> None:
    store = stores.new()
    fill(store, 2)
    with pytest.raises(StalenessError, match="2 episodes must be trained by step 0, which has room for 1"):
        await trainer(store, endless(1), 0).take(0)


@pytest.mark.virtual_clock
async def test_the_count_of_masked_tokens_continues_after_a_restart_and_leaves_out_what_was_not_trained() -> None:
    store = MemoryExperience()
    first = trainer(store, endless(1), 0, over_age="mask")
    fill(store, 3, finished=False)
    finish(store, 2, 0)
    await first.take(0)
    answer = episode(0, 0, 0, 0)
    answer.trajectories[0].loss_mask[3] = False  # between two turns
    store.put(answer)
    ((masked,),) = [e.trajectories for e in await first.take(1)]
    assert not masked.loss_mask.any()
    assert first.stats()["rollout/num_masked_tokens"] == 2
    assert first.state_dict()["masked_tokens"] == 0, "not trained yet"
    first.trained(2)
    again = MemoryExperience()
    again.load_state_dict(pickle.loads(pickle.dumps(store.state_dict())))
    restored = trainer(again, endless(1), 0, over_age="mask")
    restored.load_state_dict(first.state_dict())
    finish(again, 1, 0, 0, 0, 2)
    await restored.take(2)
    assert restored.stats()["rollout/num_masked_tokens"] == 5
