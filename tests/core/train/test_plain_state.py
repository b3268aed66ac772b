"""The rollout's state on disk: equal after a round trip, and data only."""

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.runs.checkpoints import RunIdentity, seal
from core.train.recover import RecoverError, RecoverStore, RunState, read_state, write_state

IDENTITY = RunIdentity(train_bs_n_seqs=8, group_size=4, n_nodes=1)


def back(folder: Path, state: object) -> Any:
    write_state(folder, "state", state)
    return read_state(folder, "state")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or one != one)


def test_a_state_comes_back_with_its_types_and_every_bit(tmp_path: Path) -> None:
    state = {
        "none": None,
        "numbers": [0, -1, 2**70, 0.1, float("inf"), float("nan"), -0.0, True],
        "text": "½ \x00 \ud800 $array",
        "key": b"\x00\xff",
        "pair": (1, ("a", [2])),
        "slots": {3: [{"token_ids": np.arange(5, dtype=np.int32)}], -1: [], "3": ()},
        "marked": {"$array": ["<i4", 0, [5]], "$tuple": []},
        "arrays": [
            np.array([[1.5, np.nan], [-0.0, np.inf]], dtype=np.float32),
            np.array([True, False]),
            np.zeros((0, 4), dtype=np.int16),
            np.array(7, dtype=np.int64),
            np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
        ],
    }
    assert same(state, back(tmp_path, state))
    assert same({}, back(tmp_path, {})) and same([], back(tmp_path, []))
    assert same([1.5, 2, True], back(tmp_path, [np.float32(1.5), np.int64(2), np.bool_(True)]))


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, np.array([object()]), np.array(["text"])], ids=["object", "set", "objects", "texts"]
)
def test_a_value_without_plain_form_is_refused_with_its_place(tmp_path: Path, value: object) -> None:
    with pytest.raises(TypeError, match=r"state\.ready\[1\]: .* cannot be saved in a recover checkpoint"):
        write_state(tmp_path, "state", {"ready": [0, value]})


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def hostile_npz(path: Path, bomb: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("<i4.npy", b"\x93NUMPY\x01\x00" + header("|O") + bomb)


def header(dtype: str) -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': (1,)}}".encode().ljust(117) + b"\n"
    return len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize("name", ["run.json", "rollout.json", "rollout.npz", "objects in rollout.npz"])
def test_no_file_of_the_driver_or_the_rollout_runs_code(tmp_path: Path, name: str) -> None:
    store = RecoverStore(tmp_path / "recover", IDENTITY)
    state = {"cursor": 7, "token_ids": np.arange(3, dtype=np.int32)}
    store.begin(RunState(step=2, version=2, elapsed_seconds=1.0, extra={}), lambda: state, engines, began=0.0)
    store.wait()
    folder = tmp_path / "recover" / "globalstep2"
    assert sorted(os.listdir(folder)) == ["COMMITTED", "manifest.json", "rollout.json", "rollout.npz", "run.json"]
    bomb = pickle.dumps(Touch(tmp_path / "touched"))
    if name.startswith("objects"):
        hostile_npz(folder / "rollout.npz", bomb)
    else:
        (folder / name).write_bytes(bomb)
    with pytest.raises(RecoverError, match="globalstep2"):
        store.load(folder)
    assert not (tmp_path / "touched").exists()


def engines(folder: Path) -> Any:
    return lambda stop: None


@pytest.mark.parametrize(
    "tree",
    [
        {"$array": ["<i4", 0, [4]]},
        {"$array": ["<i4", -1, [1]]},
        {"$array": ["<i4", -2, [1]]},
        {"$array": ["<i4", 0, [-1, -3]]},
        {"$array": ["<f8", 0, [1]]},
        {"$array": 3},
        {"$code": "import os"},
        {"$bytes": "zz"},
        {"$dict": [[{"$array": ["<i4", 0, [1]]}, 0]]},
    ],
    ids=str,
)
def test_a_structure_that_fits_no_array_is_refused(tmp_path: Path, tree: object) -> None:
    write_state(tmp_path, "state", [np.arange(3, dtype=np.int32)])
    (tmp_path / "state.json").write_text(json.dumps(tree))
    with pytest.raises(RecoverError, match="do not hold a saved state"):
        read_state(tmp_path, "state")


HOSTILE = ["[" * 100_000, "[]", "{}", '{"files": {}}', '{"size": "1"}', ""]


@pytest.mark.parametrize("name", ["COMMITTED", "manifest.json", "run.json", "rollout.json", "rollout.npz"])
@pytest.mark.parametrize("content", [*HOSTILE, None, "6"], ids=lambda c: f"{str(c)[:15]}")
def test_a_checkpoint_that_holds_anything_else_is_passed_over_for_the_one_before(tmp_path, name, content) -> None:
    """Also where it was sealed like that."""
    store = RecoverStore(tmp_path, IDENTITY)
    for step in (1, 2):
        store.begin(RunState(step=step, version=step, elapsed_seconds=1.0, extra={}), list, engines, began=0.0)
        store.wait()
    newest = tmp_path / "globalstep2"
    assert store.newest() == newest
    (newest / name).unlink()
    if content is None:
        os.mkfifo(newest / name)
    elif content == "6":
        (newest / name).write_text(f'{{"identity": {{}}, "state": {{"step": "{content}"}}}}')
    else:
        (newest / name).write_text(content)
    if name not in ("COMMITTED", "manifest.json"):
        (newest / "COMMITTED").unlink()
        seal(newest)
    passed_over = name != "rollout.json" or content not in (*HOSTILE[1:5], "6")
    assert store.newest() == (tmp_path / "globalstep1" if passed_over else newest)
