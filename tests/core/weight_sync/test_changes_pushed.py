"""Pushes through files that hold only what has changed: what arrives, and when everything is sent."""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.weight_sync.buckets import Sender
from core.weight_sync.push import PushError, SendReport
from helpers.push_doubles import UPDATE_OF, connected, paused
from helpers.sglang_double import model
from helpers.sglang_double.server import SGLangDouble
from helpers.sglang_double.weights import Parameters
from rollout.inference.changes import INDEX, ChangesWriter

SHARE = 0.02


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model.write(tmp_path / "model")


def weights(version: int) -> dict[str, Tensor]:
    """Version 1, of which each later one has changed 2 % of every tensor's values."""
    tensors = model.weights(1)
    for later in range(2, version + 1):
        generator = torch.Generator().manual_seed(later)
        for tensor in tensors.values():
            positions = torch.randperm(tensor.numel(), generator=generator)[: int(SHARE * tensor.numel())]
            tensor.view(-1)[positions] += 1.0
    return tensors


def push(sender: Sender, version: int, *, all_of: int | None = None) -> SendReport:
    """Push weights(version), or all other weights of the version `all_of`, in three buckets with their checksums."""
    items = list((weights(version) if all_of is None else model.weights(all_of)).items())
    sender.prepare((dict(items[part::3]) for part in range(3)), verify=True)
    report = sender.send()
    assert report is not None and report.compared == "all checksums equal"
    return report


def holds(double: SGLangDouble, version: int, *, all_of: int | None = None) -> bool:
    tensors = weights(version) if all_of is None else model.weights(all_of)
    expected = Parameters(tensors, tp=double.tp, dtype=torch.float32)
    return all(
        torch.equal(mine[name], theirs[name])
        for mine, theirs in zip(double.parameters.ranks, expected.ranks, strict=True)
        for name in theirs
    )


def test_after_the_first_push_only_changes_are_sent_and_every_rank_has_the_weights_bit_for_bit(folder: Path) -> None:
    with paused(2, 1) as (doubles, servers):
        sender = connected("disk", folder, servers, changes="always")
        whole = push(sender, 1)
        assert whole.changed is None
        for version in (2, 3):
            report = push(sender, version)
            assert report.changed == pytest.approx(SHARE, abs=0.002)
            assert report.num_bytes < 0.1 * whole.num_bytes, "5 bytes for every value, and the headers of three files"
            assert all(holds(double, version) for double in doubles)
        same = push(sender, 3)
        assert (same.changed, same.num_bytes, same.num_buckets) == (0.0, 0, 0)
        assert all(holds(double, 3) for double in doubles)
        assert not list(folder.glob("push-*"))


def test_without_the_setting_every_push_is_whole(folder: Path) -> None:
    with paused(1) as (_, servers):
        sender = connected("disk", folder, servers)
        assert [push(sender, version).changed for version in (1, 2)] == [None, None]


def test_a_server_that_has_started_anew_gets_everything_at_once_and_changes_from_then_on(folder: Path, caplog) -> None:
    with paused(1, 2) as (doubles, servers):
        sender = connected("disk", folder, servers, changes="always")
        all_bytes = push(sender, 1).num_bytes
        doubles[1].parameters = Parameters(model.weights(0), tp=2, dtype=torch.float32)
        doubles[1].push = None
        with caplog.at_level(logging.WARNING):
            report = push(sender, 2)
        assert report.changed is not None and all_bytes < report.num_bytes < 1.1 * all_bytes, "both were written"
        assert "generator-1" in caplog.text and "generator-0" not in caplog.text
        assert all(holds(double, 2) for double in doubles)
        assert [len(double.bodies(UPDATE_OF["disk"])) for double in doubles] == [2, 3]
        assert push(sender, 3).changed is not None
        assert [len(double.bodies(UPDATE_OF["disk"])) for double in doubles] == [3, 4]
        assert all(holds(double, 3) for double in doubles)
        assert not list(folder.glob("push-*"))


def test_a_server_that_cannot_apply_changes_gets_everything_now_and_later(folder: Path, caplog) -> None:
    with paused(1) as ((double,), servers):
        sender = connected("disk", folder, servers, changes="always")
        push(sender, 1)
        double.faults.refuse(UPDATE_OF["disk"], "NotImplementedError: add of a tensor", status=400)
        push(sender, 2)
        assert holds(double, 2)
        assert "add of a tensor" in caplog.text and "No more changes are sent" in caplog.text
        assert push(sender, 3).changed is None
        assert holds(double, 3)


def test_a_damaged_file_of_changes_is_named_and_everything_is_sent(folder: Path, caplog) -> None:
    with paused(1) as ((double,), servers):
        sender = connected("disk", folder, servers, changes="always")
        sender.prepare(iter([weights(1)]), verify=True)
        sender.send()
        sender.prepare(iter([weights(2)]), verify=True)
        (file,) = folder.glob("push-*/*.safetensors")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        sender.send()
        assert holds(double, 2) and f"{file.name}: its SHA-256 is not the one in {INDEX}" in caplog.text


@pytest.mark.parametrize("when", ["prepare", "send"])
def test_after_a_push_that_failed_the_next_one_is_whole(when: str, folder: Path, monkeypatch) -> None:
    """What the servers have then is not what the sender had last."""

    def full(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    with paused(1) as ((double,), servers):
        sender = connected("disk", folder, servers, changes="always")
        push(sender, 1)
        with monkeypatch.context() as patched:
            if when == "prepare":
                patched.setattr(ChangesWriter, "finish", full)
            else:
                double.flip_after(1, rank=0, name="model.norm.weight", byte=3)
            with pytest.raises((OSError, PushError)):
                push(sender, 2)
        assert not list(folder.glob("push-*"))
        assert push(sender, 3).changed is None
        assert holds(double, 3)
