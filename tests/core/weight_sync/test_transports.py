"""The senders on two real trainer ranks, into two processes that receive as servers do; and who calls them when."""

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from allocation import parse
from core.weight_sync.buckets import Buckets, buckets_to_stage, make_sender
from core.weight_sync.ipc import IpcSender
from core.weight_sync.nccl import NcclSender
from core.weight_sync.push import (
    Deadline,
    PushError,
    SenderSettings,
    SendReport,
    WeightPush,
    in_background,
    with_colocated_ranks,
)
from helpers.forks.calls import Inbox, calling
from helpers.push_receiver import receive
from rollout.bucket import FlatBucket
from rollout.errors import GeneratorCallError
from rollout.inference.registry import choose_transport
from rollout.inference.sglang.client import SGLangEndpoint
from tracing import FOLDER, record_spans

CONFIG = {
    "model_type": "qwen2", "vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64,
}  # fmt: skip
NUM_BUCKETS = 5

Push = tuple[str, int | None]
"""A transport, and the bytes it may lay out ahead."""


def tensors_of(version: int, bucket: int) -> dict[str, Tensor]:
    """What rank 0 gives: float32 where the servers hold bfloat16, and an integer buffer."""
    generator = torch.Generator().manual_seed(100 * version + bucket)
    return {
        f"layers.{bucket}.a_norm.weight": torch.randn(33, generator=generator),
        f"layers.{bucket}.b_norm.weight": torch.randn(4, 7, generator=generator).T,
        f"layers.{bucket}.count": torch.randint(1 << 20, (3,), generator=generator),
    }


def gather(kind: str, rank: int, version: int) -> Iterator[dict[str, Tensor]]:
    """Collective, as the engine's export is: every step waits for all ranks. One bucket is empty."""
    for bucket in range(NUM_BUCKETS):
        dist.barrier()
        yield tensors_of(version, bucket) if (rank == 0 or kind == "ipc") and bucket != 2 else {}


def sender_on(kind: str, rank: int, folder: Path, staged_bytes: int | None) -> Any:
    settings = SenderSettings(
        type=kind, rank=rank, world_size=2, dtype="bfloat16", timeout_seconds=30.0, bucket_bytes=1000,  # type: ignore[arg-type]
        staged_bytes=staged_bytes, folder=folder, model_path=str(folder),
    )  # fmt: skip
    return make_sender(settings)


def trainer_rank(rank: int, pushes: list[Push], servers: list[SGLangEndpoint], folder: Path, out: Any) -> None:
    """Push two versions by each transport in turn; tells (rank, place of the transport, report or error). The first
    error that the ranks do not share ends them, as it ends a run."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for place, (kind, staged_bytes) in enumerate(pushes):
        sender = sender_on(kind, rank, folder, staged_bytes)
        try:
            sender.connect(servers)
            for version in (1, 2):
                sender.prepare(gather(kind, rank, version), verify=True)
                report = sender.send()
            sender.close()
            out.put((rank, place, report))
        except (PushError, GeneratorCallError) as e:
            out.put((rank, place, f"{type(e).__name__}: {e}"))


@contextmanager
def receivers(folder: Path, refuse_from: int) -> Iterator[list[SGLangEndpoint]]:
    """One process for each of the two trainer ranks to sit beside."""
    files = [folder / f"port-{i}" for i in range(2)]
    with ExitStack() as stack:
        started = [stack.enter_context(calling(receive, file, refuse_from)) for file in files]
        while not all(file.exists() for file in files):
            assert all(process.poll() is None for process in started)
            time.sleep(0.05)
        yield [
            SGLangEndpoint(
                name=f"generator-{i}", url=f"http://127.0.0.1:{f.read_text()}", tp=1, trainer_ranks=(i,),
                model_path=str(folder),
            )
            for i, f in enumerate(files)
        ]  # fmt: skip


def run_trainer(pushes: list[Push], servers: list[SGLangEndpoint], folder: Path, num_results: int) -> dict[Any, Any]:
    """(rank, place of the transport) -> report or error, the first `num_results` of them."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    out = Inbox()
    with calling(trainer_rank, 0, pushes, servers, folder, out), calling(trainer_rank, 1, pushes, servers, folder, out):
        results = [out.get(timeout=200) for _ in range(num_results)]
    return {(rank, place): result for rank, place, result in results}


def test_what_a_killed_push_left_on_disk_is_removed_by_the_next_attempt(tmp_path: Path) -> None:
    for name in ("push-7", "globalstep4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00000.safetensors").write_bytes(b"half")
    sender_on("disk", 1, tmp_path, None).connect([])
    assert (tmp_path / "push-7").exists(), "the first rank alone writes and removes"
    sender_on("disk", 0, tmp_path, None).connect([])
    assert [path.name for path in tmp_path.iterdir()] == ["globalstep4"]


def test_pushes_from_two_ranks_reach_two_servers_bit_for_bit_and_a_refusal_fails_them_with_its_reason(tmp_path) -> None:
    """The servers' own checksums are compared in the push; here the counts and the report. A push by ipc fails on every
    rank, as all of them hold memory for it; by nccl where the broadcast is."""
    pushes: list[Push] = [("nccl", 2000), ("ipc", 0), ("disk", None), ("ipc", None), ("nccl", None)]
    taken = 2 * (NUM_BUCKETS - 1) + 2 * (NUM_BUCKETS - 1) + 2  # a folder is one update
    with receivers(tmp_path, refuse_from=taken + NUM_BUCKETS) as servers:
        results = run_trainer(pushes, servers, tmp_path, num_results=9)
    for place, (kind, _) in enumerate(pushes[:3]):
        report = results[0, place]
        assert isinstance(report, SendReport), report
        assert report.num_buckets == NUM_BUCKETS - 1
        if kind != "disk":  # whose files have headers
            assert report.num_bytes == (NUM_BUCKETS - 1) * ((33 + 28) * 2 + 3 * 8)
        assert results[1, place] is None
    assert results.keys() - {(rank, place) for rank in range(2) for place in range(3)} == {(0, 3), (1, 3), (0, 4)}
    for refused in ((0, 3), (1, 3), (0, 4)):
        said = results[refused]
        assert isinstance(said, str) and "generator-" in said and "no more of these" in said


def settings_alone(**changes: Any) -> SenderSettings:
    values: dict[str, Any] = dict(type="ipc", dtype="bfloat16", timeout_seconds=60.0, bucket_bytes=1000)
    return SenderSettings(**values | changes)


def test_buckets_are_made_ahead_as_far_as_they_fit_and_no_further() -> None:
    made: list[int] = []

    def source() -> Iterator[Mapping[str, Tensor]]:
        for bucket in range(NUM_BUCKETS):
            made.append(bucket)
            yield tensors_of(1, bucket)

    buckets = Buckets(source(), settings_alone(), (), verify=False)
    buckets.stage(3)
    assert made == [0, 1, 2]
    next(buckets)
    assert made == [0, 1, 2]
    assert len(list(buckets)) == NUM_BUCKETS - 1 and made == list(range(NUM_BUCKETS))


def test_as_many_buckets_are_made_ahead_as_fit_into_the_memory_and_at_least_one() -> None:
    fit = [buckets_to_stage(settings_alone(staged_bytes=n)) for n in (0, 999, 1999, 2000, 3500)]
    assert fit == [1, 1, 1, 2, 3]


class Opening:
    """A server of one rank beside trainer rank 0, which opens memory as servers on GPUs do."""

    name, tp, pp, trainer_ranks = "generator-0", 1, 1, (0,)

    def __init__(self, copies: Callable[[int], None] = lambda number: None) -> None:
        """`copies`: called with the number of each bucket, from 0, before it is copied."""
        self.opened: dict[int, weakref.ref[Tensor]] = {}
        """What the trainer frees is gone."""
        self.largest = 0
        self.calls: list[tuple[int, bool]] = []
        """Number of the memory of each bucket, and whether it was new."""
        self.received: dict[str, Tensor] = {}
        self.gathered: list[weakref.ref[Tensor]] = []
        """Memory of each bucket as it was gathered."""
        self._shared: list[tuple[FlatBucket, int]] = []
        self._copies = copies

    def share(self, bucket: FlatBucket, memory: Tensor | None, *, number: int) -> str:
        if memory is not None:
            self.opened[number] = weakref.ref(memory)
            self.largest = max(self.largest, len(memory))
        self.calls.append((number, memory is not None))
        self.gathered.append(weakref.ref(bucket.flat))
        layout = FlatBucket(
            names=bucket.names, dtypes=bucket.dtypes, shapes=bucket.shapes, flat=torch.empty(bucket.num_bytes)
        )
        self._shared.append((layout, number))
        return str(len(self._shared) - 1)

    def receive_shared(self, shared: Sequence[str], *, timeout_seconds: float) -> None:
        (index,) = map(int, shared)
        self._copies(index)
        layout, number = self._shared[index]
        memory = self.opened[number]()
        assert memory is not None, "the trainer has freed it"
        filled = replace(layout, flat=memory[: layout.num_bytes].clone())
        self.received |= filled.tensors()

    def release_shared(self, *, timeout_seconds: float) -> None:
        assert all(memory() is not None for memory in self.opened.values()), "closed before the trainer frees it"
        self.opened.clear()


def opened_by(server: Opening) -> IpcSender:
    """Return a sender on the CPU whose memory the server opens."""
    sender = IpcSender(settings_alone())
    sender._shares_memory = True
    sender.connect([server])  # type: ignore[list-item]
    return sender


def test_by_ipc_the_next_bucket_is_gathered_while_the_servers_copy_one_and_no_third_exists(tmp_path: Path) -> None:
    """The servers here copy each bucket but the last when the next one has been gathered."""
    gathered = [threading.Event() for _ in range(NUM_BUCKETS)]
    alive: list[list[int]] = []

    def kept() -> list[int]:
        return [i for i, flat in enumerate(server.gathered) if flat() is not None]

    def copies(number: int) -> None:
        if number + 1 < NUM_BUCKETS and not gathered[number + 1].wait(60):
            raise GeneratorCallError("the next bucket was not gathered")
        time.sleep(0.1)  # the sender goes on until it waits for this answer
        alive.append(kept())

    def source() -> Iterator[Mapping[str, Tensor]]:
        for bucket, event in enumerate(gathered):
            alive.append(kept())
            event.set()
            yield {f"layers.{bucket}.norm.weight": torch.full((64,), bucket, dtype=torch.bfloat16)}

    server = Opening(copies)
    sender = opened_by(server)
    sender.prepare(source(), verify=False)
    assert [event.is_set() for event in gathered] == [True] + [False] * (NUM_BUCKETS - 1)
    record_spans("sender", tmp_path, limit_mib=1)
    report = sender.send()
    record_spans("sender", tmp_path, limit_mib=0)
    rows = [json.loads(line) for line in (tmp_path / FOLDER / "sender.jsonl").read_text().splitlines()[1:]]
    assert [row[-1]["number"] for row in rows if row[:2] == ["copy", "copies of generator-0"]] == [1, 2, 3, 4, 5]
    assert [row[-1]["number"] for row in rows if row[0] == "bucket"] == [1, 2, 3, 4, 5]
    assert len([row for row in rows if row[0] == "gather"]) == NUM_BUCKETS - 1, "one was made ahead"
    assert report is not None and report.num_buckets == NUM_BUCKETS
    assert alive == [[]] * 2 * NUM_BUCKETS, "a bucket is in one of two pieces of memory alone when it is copied"


def test_the_deadline_names_who_did_not_answer() -> None:
    answers = {"generator-0": in_background(lambda: {}), "generator-1": in_background(time.sleep, 30)}
    answers["generator-0"].result()
    with pytest.raises(PushError, match=r"bucket 2: no answer within push.timeout_seconds=0.2 from generator-1$"):
        Deadline(0.2).wait(answers, "bucket 2")
    with pytest.raises(PushError, match="from the sender, although"):
        Deadline(0.2).wait({}, "bucket 2", also=lambda: False)


def test_layouts_that_a_transport_cannot_serve_are_errors_before_anything_moves(tmp_path: Path) -> None:
    staged = SGLangEndpoint(name="generator-0", url="http://127.0.0.1:9", tp=1, pp=2, trainer_ranks=(0,))
    for sender in (NcclSender(settings_alone()), IpcSender(settings_alone())):
        with pytest.raises(ValueError, match="2 pipeline stages.*push.type=disk"):
            sender.connect([staged])
    apart = SGLangEndpoint(name="generator-0", url="http://127.0.0.1:9", tp=2, trainer_ranks=(0,))
    with pytest.raises(ValueError, match="shares 1 of its 2 GPUs with the trainer.*push.type=nccl"):
        IpcSender(settings_alone()).connect([apart])


def test_a_server_finds_the_trainers_ranks_on_its_gpus() -> None:
    allocation = parse("sglang.d2m2p1|d4m1p1", n_nodes=1, n_gpus_per_node=4)
    servers = [SGLangEndpoint(name=f"generator-{i}", url="", tp=2) for i in range(2)]
    placed = with_colocated_ranks(servers, allocation.generator.replicas, allocation.trainer)
    assert [server.trainer_ranks for server in placed] == [(0, 1), (2, 3)]
    apart = parse("sglang.d2m1p1+d2m1p1", n_nodes=1, n_gpus_per_node=4)
    placed = with_colocated_ranks(servers, apart.generator.replicas, apart.trainer)
    assert [server.trainer_ranks for server in placed] == [(), ()]


class Recorder:
    """Stands for the trainer's ranks and the generators."""

    def raise_if_all_gone(self) -> None: ...

    def admit(self) -> int:
        return 1

    def membership_changed(self) -> bool:
        return False

    def mark_dead_generators(self) -> bool:
        return False

    def participated(self) -> list[Any]:
        return []

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def _record(self, *call: Any) -> None:
        self.calls.append(call)

    def push_prepare(self, engine: str, bucket_bytes: int, *, verify: bool, timeout_seconds: float) -> None:
        self._record("push_prepare", engine, bucket_bytes, verify)

    def push_send(self, timeout_seconds: float) -> SendReport:
        self._record("push_send")
        return SendReport(seconds=0.5, num_bytes=10**9, num_buckets=2)

    def offload(self, keep: str) -> None:
        self._record("offload", keep)

    def reload(self) -> None:
        self._record("reload")

    def pause(self, timeout_seconds: float) -> None:
        self._record("pause")

    def resume(self, version: int, timeout_seconds: float) -> list[float]:
        self._record("resume", version)
        return [0.25, 0.75]


def push_between(sides: Any, *, verify: Any = "first", shares_gpus: bool = False) -> WeightPush:
    plan = SenderSettings(type="ipc", dtype="bfloat16", bucket_bytes=8, timeout_seconds=60.0)
    slots = parse("sglang.d1m1p1", n_nodes=1, n_gpus_per_node=1).trainer
    return WeightPush(
        sides, sides, sides, plan=plan, slots=slots, shares_gpus=shares_gpus, verify=verify, patience_seconds=1.0
    )


@pytest.mark.parametrize(
    ("verify", "checked"),
    [("never", [False, False, False]), ("first", [True, True, False]), ("always", [True, True, True])],
)
def test_a_push_gathers_first_and_pauses_only_to_send(verify: Any, checked: list[bool]) -> None:
    sides = Recorder()
    push = push_between(sides, verify=verify)
    reports = [push.push(version) for version in (4, 5, 6)]
    assert [call for call in sides.calls if call[0] != "push_prepare"] == [
        call for version in (4, 5, 6) for call in (("pause",), ("push_send",), ("resume", version))
    ]
    assert [call for call in sides.calls[::4]] == [("push_prepare", "actor", 8, check) for check in checked]
    assert all(report.longest_pause_seconds == 0.75 for report in reports)


@pytest.mark.parametrize(
    ("text", "size", "transport"),
    [("sglang.d2m1p1+d1m2p1", 4, "nccl"), ("sglang.d1m2p1|d2m1p1", 2, "ipc"), ("sglang.d1m1p2+d2m1p1", 4, "disk")],
)
def test_the_allocation_chooses_the_transport(text: str, size: int, transport: str) -> None:
    assert choose_transport("auto", parse(text, n_nodes=1, n_gpus_per_node=size)).name == transport


@pytest.mark.parametrize(
    ("asked", "text", "size", "way_out"),
    [
        ("nccl", "embedded.d1m1p1+d1m1p1", 2, "with embedded generators use local, or auto"),
        ("nccl", "sglang.d1m1p1", 1, "use ipc or auto"),
        ("ipc", "sglang.d1m1p1+d1m1p1", 2, "use nccl or auto"),
        ("nccl", "sglang.d1m1p2+d2m1p1", 4, "pipeline stages; use disk"),
        ("local", "sglang.d1m1p1+d1m1p1", 2, "with SGLang servers use nccl, ipc or disk, or auto"),
    ],
)
def test_a_transport_that_cannot_work_is_refused_with_one_that_can(asked, text, size, way_out) -> None:
    with pytest.raises(ValueError, match=way_out):
        choose_transport(asked, parse(text, n_nodes=1, n_gpus_per_node=size))


class TurnRecorder(Recorder):
    """The two sides of shared GPUs."""

    def release_memory(self, tags: list[str], timeout_seconds: float) -> None:
        self._record("release", *tags)

    def resume_memory(self, tags: list[str], timeout_seconds: float) -> None:
        self._record("resume memory", *tags)


def test_sides_that_share_gpus_take_turns() -> None:
    sides = TurnRecorder()
    push = push_between(sides, shares_gpus=True)
    push.offload_generators()
    push.push(4)
    assert sides.calls == [
        ("pause",),
        ("release", "kv_cache", "weights"),
        ("reload",),
        ("offload", "actor"),
        ("resume memory", "weights"),
        ("push_prepare", "actor", 8, True),  # its buckets take a share of what is free now
        ("push_send",),
        ("offload", "actor"),
        ("resume memory", "kv_cache"),
        ("resume", 4),
    ]
