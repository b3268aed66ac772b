"""Recover checkpoints: valid or passed over, written beside the training, and errors that name the key."""

import errno
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import LaunchError
from core.runs import checkpoints
from core.runs.checkpoints import DamagedError, RunIdentity, verify
from core.train.recover import RecoverStore, RunState
from mcore_adapter.checkpoint.outcome import wait_for_outcome

IDENTITY = RunIdentity(train_bs_n_seqs=8, group_size=4, n_nodes=1)


def state(step: int) -> RunState:
    return RunState(step=step, version=step, elapsed_seconds=1.5, extra={"value_norm": {"mean": 0.25}})


def write_engine(folder: Path) -> Callable[[threading.Event], None]:
    (folder / "actor").mkdir()
    (folder / "actor" / "weights").write_bytes(b"w" * 100)
    return lambda stop: None


def begin(store: RecoverStore, step: int, rollout: object = None, engines: Callable = write_engine) -> None:
    store.begin(state(step), lambda: rollout, engines, began=time.perf_counter())


def dump(store: RecoverStore, step: int, rollout: object = None, engines: Callable = write_engine) -> None:
    begin(store, step, rollout, engines)
    store.wait()


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_what_was_dumped_comes_back(tmp_path: Path) -> None:
    store = RecoverStore(tmp_path / "recover", IDENTITY)
    dump(store, 2, {"cursor": 7})
    newest = RecoverStore(tmp_path / "recover", IDENTITY).newest()
    assert newest is not None and (newest / "actor" / "weights").read_bytes() == b"w" * 100
    found = store.load(newest)
    assert (found.state, found.rollout_state, found.changes) == (state(2), {"cursor": 7}, ())


def test_as_many_as_asked_for_are_kept_and_step_ten_is_newer_than_step_nine(tmp_path: Path) -> None:
    for keep, kept in ((2, ["globalstep10", "globalstep9"]), (1, ["globalstep10"])):
        store = RecoverStore(tmp_path / str(keep), IDENTITY, keep=keep)
        for step in (8, 9, 10):
            dump(store, step)
        assert names(tmp_path / str(keep)) == kept
        newest = store.newest()
        assert newest is not None and newest.name == "globalstep10"


def test_begin_returns_before_the_write_is_done_and_the_next_one_waits_for_it(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    store, written = RecoverStore(tmp_path, IDENTITY), threading.Event()

    def slow_engine(folder: Path) -> Callable[[threading.Event], None]:
        write_engine(folder)
        return lambda stop: assert_set(written)

    begin(store, 2, engines=slow_engine)
    assert store.newest() is None and "Dumped" not in caplog.text
    threading.Timer(0.2, written.set).start()
    begin(store, 3)
    newest = store.newest()
    assert newest is not None and newest.name == "globalstep2" and "Dumped recover info to file." in caplog.messages
    store.wait()
    assert names(tmp_path) == ["globalstep2", "globalstep3"]
    stopped = re.compile(r"step 3: the trainer stopped for (\S+) s, (\S+) s of it for the one before")
    (total, waited), *_ = [found.groups() for m in caplog.messages if (found := stopped.search(m))]
    assert 0.1 < float(waited) <= float(total)
    assert any("MiB written in" in m for m in caplog.messages)


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_failed_write_is_raised_and_leaves_nothing_behind_and_the_old_checkpoint_valid(
    tmp_path: Path, in_background: bool
) -> None:
    store = RecoverStore(tmp_path, IDENTITY)
    dump(store, 2, {"cursor": 1})

    def full(stop: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def disk_is_full(folder: Path) -> Callable:
        write_engine(folder)
        if not in_background:
            full(None)
        return full

    with pytest.raises(OSError, match="recover checkpoint of step 3 .* MiB left .* No space left"):
        dump(store, 3, {"cursor": 2}, disk_is_full)
    assert names(tmp_path) == ["globalstep2"]
    newest = store.newest()
    assert newest is not None and store.load(newest).rollout_state == {"cursor": 1}
    store.raise_if_failed()  # an error is raised once
    dump(store, 4)
    assert names(tmp_path) == ["globalstep2", "globalstep4"]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_worker_that_dies_is_a_lost_worker_and_no_failed_write(tmp_path: Path, in_background: bool) -> None:
    """recover_mode=auto starts another attempt for the first, and ends the run for the second."""
    store = RecoverStore(tmp_path, IDENTITY)

    def died(stop: object) -> None:
        raise LaunchError("trainer-rank0 died")

    def dies(folder: Path) -> Callable:
        write_engine(folder)
        if not in_background:
            died(None)
        # The outcome of what it was to write never comes: whoever waits asks whether it lives.
        return lambda stop: wait_for_outcome(folder / "actor", stop, lambda: died(None))

    with pytest.raises(LaunchError, match="trainer-rank0 died"):
        dump(store, 2, engines=dies)
    assert names(tmp_path) == []


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(
    "error", [RuntimeError("a collective broke"), TypeError("cannot pickle"), TimeoutError("late")]
)
def test_what_is_no_fault_of_the_disk_stays_what_it_is(tmp_path: Path, error: Exception, in_background: bool) -> None:
    def breaks(folder: Path) -> Callable:
        write_engine(folder)
        if not in_background:
            fail()
        return lambda stop: fail()

    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        dump(RecoverStore(tmp_path, IDENTITY), 2, engines=breaks)
    assert raised.value is error and names(tmp_path) == []


@pytest.mark.parametrize("method", ["wait", "raise_if_failed"])
def test_a_write_that_never_ends_costs_an_attempt_and_names_the_deadline(tmp_path: Path, method: str) -> None:
    store = RecoverStore(tmp_path, IDENTITY, timeout_seconds=0.3)
    # Nobody tells an outcome.
    begin(store, 2, engines=lambda folder: lambda stop: wait_for_outcome(folder / "actor", stop))
    with pytest.raises(LaunchError, match=r"step 2 was not written within deadlines.call_seconds=0.3 to"), store:
        while True:
            getattr(store, method)()
    assert names(tmp_path) == []


def test_the_end_of_a_run_waits_for_the_last_write_and_a_failed_run_gives_it_up(tmp_path: Path) -> None:
    with RecoverStore(tmp_path, IDENTITY) as store:
        begin(store, 2, engines=lambda folder: write_engine(folder) and (lambda stop: time.sleep(0.2)))
    assert names(tmp_path) == ["globalstep2"]

    def until_stopped(folder: Path) -> Callable[[threading.Event], None]:
        write_engine(folder)
        return lambda stop: assert_set(stop)

    with pytest.raises(ZeroDivisionError), RecoverStore(tmp_path, IDENTITY) as store:
        begin(store, 3, engines=until_stopped)
        _ = 1 / 0
    assert names(tmp_path) == ["globalstep2"]


def test_an_interrupted_write_is_invisible_and_the_next_one_clears_it_away(tmp_path: Path) -> None:
    store = RecoverStore(tmp_path, IDENTITY)
    (tmp_path / ".writing-globalstep4-123").mkdir(parents=True)
    (tmp_path / ".writing-globalstep4-123" / "rollout.json").write_bytes(b"half")
    assert store.newest() is None
    dump(store, 4)
    assert names(tmp_path) == ["globalstep4"]


def test_a_checkpoint_that_was_passed_over_is_replaced_by_the_next_of_its_step(tmp_path: Path, caplog) -> None:
    store = RecoverStore(tmp_path, IDENTITY)
    for step in (2, 3):
        dump(store, step)
    (tmp_path / "globalstep3" / "actor" / "weights").write_bytes(b"v" * 100)
    newest = store.newest()
    assert newest is not None and newest.name == "globalstep2"
    assert "globalstep3 is not used: weights is damaged: its checksum differs" in caplog.text
    dump(store, 3)
    newest = store.newest()
    assert newest is not None and newest.name == "globalstep3"
    assert names(tmp_path) == ["globalstep2", "globalstep3"]


def test_no_byte_of_manifest_and_marker_can_change_unnoticed(tmp_path: Path) -> None:
    dump(RecoverStore(tmp_path, IDENTITY), 2)
    for name in ("COMMITTED", "manifest.json"):
        path = tmp_path / "globalstep2" / name
        content = path.read_bytes()
        for i in range(len(content)):
            flipped = bytearray(content)
            flipped[i] ^= 1 << i % 8
            path.write_bytes(flipped)
            with pytest.raises(DamagedError):
                verify(tmp_path / "globalstep2")
        path.write_bytes(content)
        verify(tmp_path / "globalstep2")


@pytest.mark.parametrize("num_bytes", [16, 21, 23], ids=["whole blocks", "a part of a block", "a part of a read"])
def test_no_byte_of_a_file_of_several_blocks_can_change_unnoticed(tmp_path, monkeypatch, num_bytes: int) -> None:
    monkeypatch.setattr(checkpoints, "_BLOCK_BYTES", 8)
    monkeypatch.setattr(checkpoints, "_READ_BYTES", 4)
    content = bytes(range(num_bytes))
    weights = tmp_path / "weights"
    weights.write_bytes(content)
    checkpoints.seal(tmp_path)
    for i in range(num_bytes):
        weights.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        with pytest.raises(DamagedError, match="weights is damaged: its checksum differs"):
            verify(tmp_path)
    weights.write_bytes(content)
    verify(tmp_path)


def test_all_that_the_marker_seals_is_on_the_disk_before_the_marker_appears(tmp_path, monkeypatch) -> None:
    synced: dict[str, bytes] = {}  # content of each file, b"" of each folder, when it was last brought to the disk
    before_rename: dict[str, bytes] = {}
    fsync, rename = os.fsync, os.rename

    def record_sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced[path.relative_to(tmp_path).as_posix()] = path.read_bytes() if path.is_file() else b""
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        before_rename.update(synced)
        synced.clear()
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    (tmp_path / "actor" / "shards").mkdir(parents=True)
    files = {"run.json": b"{}", "actor/config.json": b"{ }", "actor/shards/0.distcp": b"w" * 100}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    checkpoints.seal(tmp_path)
    sealed = {name: (tmp_path / name).read_bytes() for name in ("manifest.json", "COMMITTED")}
    expected = {**files, "manifest.json": sealed["manifest.json"], ".COMMITTED": sealed["COMMITTED"]}
    assert before_rename == {**expected, ".": b"", "actor": b"", "actor/shards": b""}
    assert list(synced) == ["."], "the marker's new name is in the folder"
