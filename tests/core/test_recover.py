"""Recover checkpoints: complete or invisible, two kept, and errors that name the key."""

import errno
from pathlib import Path

import pytest

from core.recover import RecoverError, RecoverStore, RunIdentity, RunState

IDENTITY = RunIdentity(train_bs_n_seqs=8, group_size=4, n_nodes=1)


def state(step: int) -> RunState:
    return RunState(step=step, version=step, elapsed_seconds=1.5, extra={"value_norm": {"mean": 0.25}})


def write_engine(folder: Path) -> None:
    (folder / "actor").mkdir()
    (folder / "actor" / "weights").write_bytes(b"w" * 100)


def test_what_was_dumped_comes_back(tmp_path: Path) -> None:
    store = RecoverStore(tmp_path / "recover", IDENTITY)
    store.dump(state(2), {"cursor": 7}, write_engine)
    latest = RecoverStore(tmp_path / "recover", IDENTITY).latest()
    assert latest is not None and (latest / "actor" / "weights").read_bytes() == b"w" * 100
    assert store.load(latest) == (state(2), {"cursor": 7})


def test_the_two_newest_are_kept_and_step_ten_is_newer_than_step_nine(tmp_path: Path) -> None:
    store = RecoverStore(tmp_path, IDENTITY)
    for step in (8, 9, 10):
        store.dump(state(step), None, write_engine)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["globalstep10", "globalstep9"]
    latest = store.latest()
    assert latest is not None and latest.name == "globalstep10"


def test_a_failed_dump_leaves_nothing_behind_and_the_old_checkpoint_valid(tmp_path: Path) -> None:
    store = RecoverStore(tmp_path, IDENTITY)
    store.dump(state(2), {"cursor": 1}, write_engine)

    def disk_is_full(folder: Path) -> None:
        write_engine(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="recover checkpoint of step 3 .* MiB left .* No space left"):
        store.dump(state(3), {"cursor": 2}, disk_is_full)
    assert [p.name for p in tmp_path.iterdir()] == ["globalstep2"]
    latest = store.latest()
    assert latest is not None and store.load(latest) == (state(2), {"cursor": 1})


def test_an_interrupted_write_is_invisible_and_the_next_dump_of_the_step_replaces_it(tmp_path: Path) -> None:
    store = RecoverStore(tmp_path, IDENTITY)
    (tmp_path / ".writing-globalstep4").mkdir(parents=True)
    (tmp_path / ".writing-globalstep4" / "rollout.pkl").write_bytes(b"half")
    assert store.latest() is None
    store.dump(state(4), None, write_engine)
    assert [p.name for p in tmp_path.iterdir()] == ["globalstep4"]


@pytest.mark.parametrize("key", ["train_bs_n_seqs", "group_size", "n_nodes"])
def test_a_changed_setting_is_named_with_both_values(tmp_path: Path, key: str) -> None:
    path = RecoverStore(tmp_path, IDENTITY).dump(state(2), None, write_engine)
    changed = RunIdentity(**{**IDENTITY.__dict__, key: 99})
    with pytest.raises(RecoverError, match=f"{key}=99.*{key}={getattr(IDENTITY, key)}"):
        RecoverStore(tmp_path, changed).load(path)
