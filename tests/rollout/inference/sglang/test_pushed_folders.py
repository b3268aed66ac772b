"""Which weights a SGLang server takes changes to. That its loader applies them: test_sglang_live.py."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.inference.changes import IDENTITY, NOT_THE_BASE, ChangesWriter
from rollout.inference.sglang import receivers as pushed_folders
from rollout.inference.sglang.receivers import PushedFolders


def load_whole(updater: Any, model_path: str, load_format: str) -> tuple[bool, str]:
    """In place of WeightUpdater.update_weights_from_disk."""
    assert load_format == "auto"
    return (Path(model_path) / IDENTITY).is_file(), "read"


def apply(updater: Any, tensors: Any) -> None:
    """In place of the server's own loader."""
    for name, tensor in tensors(torch.device("cpu")):
        updater.weights[name].copy_(tensor)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> tuple[PushedFolders, dict[str, Tensor]]:
    """The hook of a server, and its weights."""
    monkeypatch.setattr(pushed_folders, "_load_some", apply)
    return PushedFolders(), {"w": torch.zeros(10)}


def whole(folder: Path, identity: str) -> Path:
    folder.mkdir()
    (folder / IDENTITY).write_text(json.dumps({"id": identity}))
    return folder


def changed(folder: Path, base: str, identity: str, value: float) -> Path:
    """Changes of the value at position 3 to weights of zeros."""
    folder.mkdir()
    writer = ChangesWriter(folder)
    writer.add({"w": torch.tensor([0, 0, 0, value] + 6 * [0.0])}, {"w": torch.zeros(10)})
    writer.finish(base=base, identity=identity)
    return folder


def test_changes_follow_the_push_before_and_each_other(server: Any, tmp_path: Path) -> None:
    folders, weights = server
    updater = SimpleNamespace(weights=weights)

    def load(path: Path) -> tuple[bool, str]:
        return folders.load(load_whole, updater, str(path), "auto")

    first, second = changed(tmp_path / "1", "a", "b", 1.0), changed(tmp_path / "2", "b", "c", 2.0)
    ok, message = load(first)
    assert not ok and NOT_THE_BASE in message, "the server has the weights that it started with"
    assert load(whole(tmp_path / "0", "a")) == (True, "read")
    assert load(first)[0] and weights["w"][3] == 1.0
    assert load(second)[0] and weights["w"][3] == 2.0
    ok, message = load(second)
    assert not ok and NOT_THE_BASE in message
    assert not load(changed(tmp_path / "3", "c", "d", 3.0))[0], "after a refusal everything must come first"


@pytest.mark.parametrize("way", ["another update or release", "a folder of another sender", "a failed load"])
def test_after_weights_that_came_another_way_everything_must_come_first(server: Any, tmp_path: Path, way: str) -> None:
    folders, weights = server
    updater = SimpleNamespace(weights=weights)
    assert folders.load(load_whole, updater, str(whole(tmp_path / "0", "a")), "auto")[0]
    if way == "another update or release":
        folders.forget((True, "Success"), updater)
    else:
        (tmp_path / "other").mkdir()
        folders.load(lambda *_: (way != "a failed load", ""), updater, str(tmp_path / "other"), "auto")
    ok, message = folders.load(load_whole, updater, str(changed(tmp_path / "1", "a", "b", 1.0)), "auto")
    assert not ok and NOT_THE_BASE in message
    assert weights["w"].eq(0).all()


def test_a_loader_that_fails_is_a_refusal_and_its_reason(server, tmp_path, monkeypatch) -> None:
    def fail(*_: Any) -> None:
        raise NotImplementedError("add of a tensor")

    folders, weights = server
    updater = SimpleNamespace(weights=weights)
    assert folders.load(load_whole, updater, str(whole(tmp_path / "0", "a")), "auto")[0]
    monkeypatch.setattr(pushed_folders, "_load_some", fail)
    first = str(changed(tmp_path / "1", "a", "b", 1.0))
    assert folders.load(load_whole, updater, first, "auto") == (False, "NotImplementedError: add of a tensor")
    monkeypatch.setattr(pushed_folders, "_load_some", apply)
    assert NOT_THE_BASE in folders.load(load_whole, updater, first, "auto")[1], "half of it may have been applied"


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_the_failure_of_any_rank_is_reported_and_ends_changes_on_all(failing, server, tmp_path, monkeypatch) -> None:
    """Two ranks, on each of which the other's outcome arrives."""
    outcomes = [(rank != failing, "out of memory" if rank == failing else "read") for rank in range(2)]

    def gather(received: list[Any], mine: Any, group: str) -> None:
        assert group == "tp" and mine in outcomes
        received[:] = outcomes

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    folders, weights = server
    updater, manager = SimpleNamespace(weights=weights), SimpleNamespace(tp_cpu_group="tp")
    for success, message in outcomes:
        assert folders.load(load_whole, updater, str(whole(tmp_path / str(message), "a")), "auto")[0]
        result = SimpleNamespace(success=success, message=message)
        folders.report_any_failure(result, manager, "request")
        expected = (True, "read") if failing is None else (False, "out of memory")
        assert (result.success, result.message) == expected
        (tmp_path / str(message) / IDENTITY).unlink()
        (tmp_path / str(message)).rmdir()
    changes_fit = folders.load(load_whole, updater, str(changed(tmp_path / "1", "a", "b", 1.0)), "auto")[0]
    assert changes_fit == (failing is None)
