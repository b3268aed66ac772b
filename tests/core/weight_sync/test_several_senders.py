"""Several trainer ranks that each send a part of the weights: real processes, one group for each, in turns.

Four ranks, of which three send; the fourth takes part in gathering alone. The servers are doubles in this process.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core.processes.meeting import LOOPBACK, listen, served_store
from core.weight_sync.buckets import SenderSettings, SendReport
from core.weight_sync.comparing import Sent
from core.weight_sync.errors import PushError
from core.weight_sync.nccl import NcclSender
from core.weight_sync.turns import Turns
from helpers import mcore_ranks
from helpers.mcore_ranks import Rank, RankPool
from helpers.push_doubles import UPDATE_OF, holds, paused
from helpers.sglang_double import model
from rollout.inference.backend import PartialChecksums
from rollout.inference.bucket import FlatBucket
from rollout.inference.sglang.checksums import ExpectedChecksums, ModelShape
from rollout.inference.sglang.endpoint import SGLangEndpoint

WORLD, SENDERS = 4, (0, 1, 3)
EMBEDDING, NORM = "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"
UPDATE = UPDATE_OF["nccl"]

Result = tuple[Any, tuple[str, ...]]
"""The report of a push, or the text of its error, and the servers that the error names."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


def shares() -> dict[int, list[list[str]]]:
    """Tensors by sender and bucket: three, two and one of them, which cut through fused parameters."""
    names = list(model.weights(0))
    parts = [names[i::3] for i in range(3)]
    return {0: [parts[0][:1], parts[0][1:3], parts[0][3:]], 1: [parts[1][:2], parts[1][2:]], 3: [parts[2]]}


def gather(rank: int, version: int, fault: str = "") -> Iterator[Mapping[str, Tensor]]:
    """Collective, as the engine's export is: every round waits for all ranks."""
    weights, mine = model.weights(version), shares().get(rank, [])
    for number in range(3):
        if fault not in ("dead", "of another rank"):  # a collective may fail before the sender does
            dist.barrier()
        if fault == "slow" and number == 1:
            time.sleep(6.0)
        if fault == "dead" and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield {name: weights[name] for name in mine[number]} if number < len(mine) else {}


@contextmanager
def world(rank: Rank, port: int) -> Iterator[None]:
    store = dist.TCPStore(LOOPBACK, port, WORLD, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=WORLD, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()


def corrupted(tensors: Mapping[str, Tensor], of: Any = FlatBucket.of) -> FlatBucket:
    """A bucket of which one bit is wrong on its way."""
    bucket = of(tensors)
    bucket.flat[-1] ^= 1
    return bucket


def push(rank: Rank, servers: list[SGLangEndpoint], version: int, fault: str = "", seconds: float = 30.0) -> Result:
    settings = SenderSettings(
        rank=rank.rank, world_size=WORLD, senders=SENDERS, dtype=torch.float32, timeout_seconds=seconds,
        bucket_bytes=1 << 20, staged_bytes=0, connection=f"push-{version}",
    )  # fmt: skip
    sender = NcclSender(settings, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        if fault == "corrupting":
            patch.setattr(FlatBucket, "of", staticmethod(corrupted))
        try:
            sender.connect(servers)
            sender.prepare(gather(rank.rank, version, fault), verify=True)
            report: Any = sender.send()
            servers_named: tuple[str, ...] = ()
        except PushError as error:
            report, servers_named = str(error), error.servers
    sender.close()
    return report, servers_named


def pushes(rank: Rank, port: int, servers: list[SGLangEndpoint], at_fault: int, fault: str) -> list[Result]:
    """A push with a fault of one rank, and another one without; all ranks come to both."""
    with world(rank, port):
        mine = fault if rank.rank == at_fault else ""
        first = push(rank, servers, 1, mine, seconds=3.0 if fault else 30.0)
        dist.barrier()
        return [first, push(rank, servers, 2)]


@contextmanager
def store() -> Iterator[int]:
    """Port of the store of the trainer's ranks, in this process, which outlives them."""
    listener = listen(LOOPBACK, 0)
    port = listener.getsockname()[1]
    served = served_store(listener, WORLD, timeout_seconds=60)
    yield port
    del served


def waits_for_its_turn(rank: Rank, port: int) -> tuple[str, float]:
    """The message of a sender that waits for another one, and how long it waited beyond the time for a push."""
    with world(rank, port):
        turns = Turns(SENDERS, rank.rank, "late")
        dist.barrier()
        if rank.rank not in SENDERS[1:]:
            dist.barrier()
            return "", 0.0
        begin = time.monotonic()
        with pytest.raises(PushError) as raised:
            turns.wait(turns.deadline(0.5))
        late = time.monotonic() - begin - 0.5
        dist.barrier()
        return str(raised.value), late


def test_a_late_sender_is_named_when_the_time_is_over(ranks: RankPool) -> None:
    with store() as port:
        results = ranks.run(waits_for_its_turn, WORLD, port)
    for message, late in (results[number] for number in SENDERS[1:]):
        assert message.startswith(f"trainer rank {SENDERS[0]}, one of 3 senders of the weight push, did not send")
        assert 0 <= late < 1


def test_every_sender_sends_its_part_once_through_a_group_of_its_own(ranks: RankPool) -> None:
    with paused(2, 1) as (doubles, servers), store() as port:
        results = ranks.run(pushes, WORLD, port, servers, 0, "")
        for number in (0, 1):
            report, *others = (result[number][0] for result in results)
            assert isinstance(report, SendReport), report
            assert (report.compared, report.num_senders, report.num_buckets) == ("all checksums equal", 3, 6)
            assert report.num_bytes == sum(tensor.nbytes for tensor in model.weights(0).values())
            assert others == [None] * 3
        for double in doubles:
            assert holds(double, 2)
            assert double.most_updates_at_once == 1 and not double.groups
            groups = [body["group_name"] for body in double.bodies(UPDATE)]
            assert len(set(groups)) == 6 and len(groups) == 12, "a group for each sender of both pushes"
            first = [body["names"] for body in double.bodies(UPDATE)[:6]]
            expected = [part[number] for number in range(3) for part in shares().values() if number < len(part)]
            assert [sorted(names) for names in first] == [sorted(names) for names in expected], "bucket by bucket"


def first_errors(results: list[list[Result]]) -> list[Result]:
    """Those of the first push; the second one has succeeded."""
    assert results[0][1][0].compared == "all checksums equal"
    return [first for first, _ in results if isinstance(first[0], str)]


@pytest.mark.parametrize(
    ("fault", "at_fault", "message"),
    [
        ("slow", 1, "trainer rank 1, one of 3 senders of the weight push, did not send its part within push.timeout"),
        ("corrupting", 3, rf"generator-0: 2 .*{NORM} \(rank 0\) from trainer rank 3.*; generator-1: 1 .*rank 3$"),
    ],
)
def test_a_sender_at_fault_is_named_and_the_next_push_repairs_it(
    ranks: RankPool, fault: str, at_fault: int, message: str
) -> None:
    with paused(2, 1) as (doubles, servers), store() as port:
        errors = first_errors(ranks.run(pushes, WORLD, port, servers, at_fault, fault))
        assert len(errors) == (3 if fault == "slow" else 1), "the first one compares"
        for error, named in errors:
            assert re.search(message, error), error
            assert len(named) != 1, "no server alone is at fault"
        assert all(holds(double, 2) for double in doubles)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("slow", r"bucket 1 of the weight push: no answer within push.timeout_seconds=3 minus 0.3 s from generator-1$"),
        ("dead", rf"generator-1 \(http://127.*\) is unreachable \({UPDATE}: "),
        ("refusing", rf"generator-1: {UPDATE} failed \(HTTP 400\): out of memory$"),
        ("corrupting", rf"^generator-1: 1 parameters differ .*: {EMBEDDING} \(rank 0\) from trainer rank 0$"),
    ],
)
def test_a_server_at_fault_is_named_by_every_sender_and_the_next_push_repairs_it(
    ranks: RankPool, fault: str, message: str
) -> None:
    with paused(2, 1) as (doubles, servers), store() as port:
        faults = doubles[1].faults
        held = faults.hold_answer(UPDATE) if fault == "slow" else None
        if fault == "dead":
            faults.drop(UPDATE)
        elif fault == "refusing":
            faults.refuse(UPDATE, "out of memory")
        elif fault == "corrupting":
            doubles[1].flip_after(6, rank=0, name=EMBEDDING, byte=99)
        errors = first_errors(ranks.run(pushes, WORLD, port, servers, -1, "of a server"))
        if held is not None:
            held.release()
        assert len(errors) == (1 if fault == "corrupting" else 3)
        for error, named in errors:
            assert re.search(message, error), error
            assert named == ("generator-1",)
        assert all(holds(double, 2) for double in doubles)


def push_and_die(rank: Rank, port: int, servers: list[SGLangEndpoint], errors: Path) -> None:
    fault = "dead" if rank.rank == 1 else "of another rank"
    with world(rank, port):
        (errors / str(rank.rank)).write_text(str(push(rank, servers, 1, fault, 3.0)[0]))


@pytest.mark.nightly  # the pool of ranks starts afresh
def test_a_sender_that_is_killed_is_named_and_new_ranks_push_again(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcore_ranks, "_GRACE_SECONDS", 30.0)  # the others report at their deadline
    with paused(2, 1) as (doubles, servers):
        with store() as port, pytest.raises(AssertionError, match="rank 1 ---\nthe process died with exit code -9"):
            ranks.run(push_and_die, WORLD, port, servers, tmp_path)
        for path in (tmp_path / "0", tmp_path / "3"):
            assert "trainer rank 1, one of 3 senders of the weight push, did not" in path.read_text()
        with store() as port:
            results = ranks.run(pushes, WORLD, port, servers, -1, "")
        assert results[0][1][0].compared == "all checksums equal"
        assert all(holds(double, 2) for double in doubles)


class Counting(ExpectedChecksums):
    """Counts how often its sums are computed."""

    count = 0

    def partial(self) -> PartialChecksums:
        self.count += 1
        return super().partial()


def test_a_sender_computes_its_own_sums_once_however_many_others_it_includes() -> None:
    shape = ModelShape(num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=64)
    own = Counting(shape, tp=1)
    own.add({NORM: torch.ones(8)})
    sent = Sent(expected={1: own}, num_bytes=32)
    for rank in (1, 3):
        other = ExpectedChecksums(shape, tp=1)
        other.add({EMBEDDING: torch.full((64, 8), float(rank))})
        sent.include(Sent(expected={1: other}, num_bytes=2048).to_text(rank), 0)
    assert own.count == 1
    assert sent.origins == {NORM: [0], EMBEDDING: [1, 3]} and sent.num_bytes == 32 + 2 * 2048
