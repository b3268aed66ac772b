"""Every transport into servers of one and two ranks: what arrives, what is found, and what is left after a failure."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core.weight_sync.push import PushError, SendReport, in_background
from helpers.push_doubles import KINDS, UPDATE_OF, buckets, connected, holds, limit, paused, push, sender_of
from helpers.sglang_double import model
from helpers.sglang_double.updates import UPDATES
from rollout.errors import GeneratorCallError, GeneratorGone

MLP = "model.layers.0.mlp.gate_up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model.write(tmp_path / "model")


def pushed_folders(folder: Path) -> list[Path]:
    return list(folder.glob("push-*"))


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_of_every_server_has_the_pushed_weights_and_the_report_says_that_they_were_compared(
    kind: str, backwards: bool, folder: Path
) -> None:
    with paused(2, 1) as (doubles, servers):
        for double in doubles:
            double.ranks_backwards = backwards
        sender = connected(kind, folder, servers)
        for version in (1, 2):
            report = push(sender, version)
            assert isinstance(report, SendReport)
            assert (report.num_buckets, report.compared) == (3, "all checksums equal")
            assert all(holds(double, version) for double in doubles)
            assert not pushed_folders(folder)
        sender.close()
        for double in doubles:
            assert all(call.paused for call in double.calls if call.path in UPDATES)
            updates = double.bodies(UPDATE_OF[kind])
            assert len(updates) == (2 if kind == "disk" else 6)
            assert not any(body["flush_cache"] for body in updates), "with requests waiting a server fails at that"
            assert not double.groups, "the group was left"


def test_servers_in_bfloat16_get_float32_weights_rounded(folder: Path) -> None:
    with paused(2, dtype=torch.bfloat16) as ((double,), servers):
        sender = connected("ipc", folder, servers, dtype="bfloat16")
        fine = {name: tensor * 1.001 for name, tensor in model.weights(1).items()}
        sender.prepare(iter([fine]), verify=True)
        report = sender.send()
        assert report is not None and report.compared == "all checksums equal"
        expected = (model.weights(1)["model.norm.weight"] * 1.001).bfloat16()
        assert torch.equal(double.parameters.ranks[1]["model.norm.weight"], expected)


def test_nothing_is_said_to_be_compared_where_nothing_was(folder: Path) -> None:
    with paused(1, 1) as (doubles, servers):
        sender = connected("disk", folder, servers)
        assert push(sender, 1, verify=False).compared == ""
        staged = [servers[0], replace(servers[1], pp=2)]
        for addresses, compared in (
            (staged, "all other checksums equal: generator-1 with pipeline stages cannot compute them"),
            (staged[1:], "no checksums compared: generator-1 with pipeline stages cannot compute them"),
        ):
            sender.connect(addresses)
            assert push(sender, 2).compared == compared
        assert doubles[1].bodies("/weights_checker") == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_one_flipped_bit_in_one_rank_is_found_where_checksums_are_compared(kind: str, rank: int, folder: Path) -> None:
    with paused(1, 2) as (doubles, servers):
        doubles[1].ranks_backwards = rank == 1
        sender = connected(kind, folder, servers)
        flip = {"rank": rank, "name": MLP, "byte": 4321}
        sender.prepare(buckets(1), verify=True)
        doubles[1].flip_after(1 if kind == "disk" else 3, **flip)  # a later bucket could write over it
        with pytest.raises(
            PushError, match=rf"^generator-1: 1 parameters differ from what was sent: {MLP} \(rank {rank}\)$"
        ):
            sender.send()
        assert not pushed_folders(folder)


@pytest.mark.parametrize("fault", ["refused", "refused with 200", "dropped"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_update_names_server_path_and_reason_and_the_next_push_works(kind, fault, folder) -> None:
    path = UPDATE_OF[kind]
    with paused(1, 2) as (doubles, servers):
        sender = connected(kind, folder, servers)
        if fault == "dropped":
            doubles[1].faults.drop(path)
        else:
            doubles[1].faults.refuse(path, "out of memory", status=200 if "200" in fault else 400)
        status = 200 if "200" in fault else 400
        message = {"dropped": rf"generator-1 \(http://127.*\) is unreachable \({path}: "}.get(
            fault, rf"generator-1: {path} failed \(HTTP {status}\): out of memory"
        )
        with pytest.raises((PushError, GeneratorCallError, GeneratorGone), match=message):
            push(sender, 1)
        assert not pushed_folders(folder)
        sender.close()
        again = connected(kind, folder, servers)
        assert push(again, 2).compared == "all checksums equal"
        assert all(holds(double, 2) for double in doubles)
        again.close()
        assert not pushed_folders(folder)


def test_a_failed_push_through_shared_memory_ends_when_no_call_of_it_is_under_way(folder: Path) -> None:
    path = UPDATE_OF["ipc"]
    with paused(1, 1) as (doubles, servers):
        sender = connected("ipc", folder, servers)
        late = doubles[0].faults.hold_call(path)
        doubles[1].faults.refuse(path, "out of memory")
        pushed = in_background(push, sender, 1)
        with pytest.raises(TimeoutError):
            pushed.result(timeout=1.0)
        late.release()
        with pytest.raises(PushError, match="generator-1: .* out of memory"):
            pushed.result(timeout=30.0)
        assert push(sender, 2).compared == "all checksums equal"
        assert all(holds(double, 2) for double in doubles)


@pytest.mark.parametrize("late", [False, True])
def test_the_communicator_of_a_failed_push_is_aborted_once_and_that_of_a_good_one_is_left(
    late: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo's abort() does nothing; NCCL's frees a rank that waits in a collective."""
    aborted: list[object] = []
    monkeypatch.setattr(dist.ProcessGroupGloo, "abort", lambda group: aborted.append(group))
    with paused(1, 2) as (doubles, servers):
        sender = connected("nccl", folder, servers)
        push(sender, 1)
        assert not aborted
        hold = None
        if late:
            limit(sender, 1.0)
            hold = doubles[1].faults.hold_call(UPDATE_OF["nccl"])
        else:
            doubles[1].faults.refuse(UPDATE_OF["nccl"], "wrong shape")
        with pytest.raises((GeneratorCallError, PushError), match="wrong shape|no answer within"):
            push(sender, 2)
        assert len(aborted) == 1
        sender.close()
        assert len(aborted) == 1 and not doubles[0].bodies("/destroy_weights_update_group")
        if hold is not None:
            hold.release()
        again = connected("nccl", folder, servers)
        push(again, 3)
        assert all(len(double.groups) == 2 for double in doubles)
        again.close()
        assert all(len(double.groups) == 1 for double in doubles) and len(aborted) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_answers_too_late_is_named_and_the_next_push_works(kind: str, folder: Path) -> None:
    with paused(1, 1) as (doubles, servers):
        sender = connected(kind, folder, servers)
        held = doubles[1].faults.hold_answer(UPDATE_OF[kind])
        limit(sender, 1.0)
        with pytest.raises(PushError, match=r"no answer within push.timeout_seconds=1 from ") as late:
            push(sender, 1)
        assert "generator-1" in str(late.value)
        held.release()
        assert not pushed_folders(folder)
        sender.close()
        again = connected(kind, folder, servers)
        assert push(again, 2).compared == "all checksums equal"
        assert all(holds(double, 2) for double in doubles)
        again.close()


@pytest.mark.parametrize("path", ["/init_weights_update_group", "/weights_checker"])
def test_a_server_that_does_not_join_or_cannot_report_its_checksums_fails_the_push(path: str, folder: Path) -> None:
    with paused(1) as ((double,), servers):
        double.faults.refuse(path, "not today", status=200)
        sender = sender_of("nccl", folder)
        with pytest.raises(PushError, match=rf"generator-0: {path} failed \(HTTP 200\): not today") as failure:
            sender.connect(servers)
            push(sender, 1)
        assert failure.value.servers == ("generator-0",)
        sender.close()


def test_a_folder_that_cannot_be_written_or_is_not_sent_is_removed(folder: Path) -> None:
    def breaks() -> Iterator[Mapping[str, Tensor]]:
        yield from list(buckets(1))[:2]
        raise OSError("the disk is full")

    with paused(1) as (_, servers):
        sender = connected("disk", folder, servers)
        with pytest.raises(OSError, match="disk is full"):
            sender.prepare(breaks(), verify=True)
        assert not pushed_folders(folder)
        with pytest.raises(PushError, match="without prepare"):
            sender.send()
        sender.prepare(buckets(1), verify=True)
        assert len(pushed_folders(folder)) == 1
        sender.close()
        assert not pushed_folders(folder)


def test_a_pushed_folder_is_complete_when_a_server_reads_it(folder: Path, tmp_path: Path) -> None:
    """Tensors, their index and the model's config.json."""
    with paused(1) as ((double,), servers):
        sender = connected("disk", folder, servers)
        sender.prepare(buckets(1), verify=True)
        (written,) = pushed_folders(folder)
        assert len({path.stat().st_mode for path in written.iterdir()}) == 1, "all follow the umask"
        shutil.copytree(written, tmp_path / "copy")
        assert (written / "config.json").read_text() == (folder / "config.json").read_text()
        sender.send()
        assert [body["model_path"] for body in double.bodies(UPDATE_OF["disk"])] == [str(written)]
        call = "/update_weights_from_disk", {"model_path": str(tmp_path / "copy")}
        push(sender, 2)
        assert holds(double, 2)
        servers[0].post(call, timeout_seconds=30)
        assert holds(double, 1)
