"""Weight push into servers on the trainer's own GPUs: every rank shares a flat bucket with the server beside it.

Rank 0 has the full tensors. Each bucket goes to all ranks of the trainer's world, and what reaches a server is a handle
to the memory of the rank on the same GPU; the bytes are copied once, by the server. Where there is no device memory
to share (CPU), the handle is the bytes themselves. While the servers copy a bucket, the ranks gather the next one.
Invariant: a bucket's memory is kept until every server has answered; the servers answer when their copies are complete.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from core.weight_sync.buckets import BucketSender, SenderSettings, SendReport
from core.weight_sync.calls import Deadline, call_all
from core.weight_sync.comparing import compare_checksums
from core.weight_sync.errors import PushError
from rollout.inference.backend import WeightEndpoint
from rollout.inference.bucket import FlatBucket
from rollout.inference.errors import GeneratorCallError, GeneratorGone
from tracing import add_span, span


class IpcSender(BucketSender):
    """See core.weight_sync.buckets.Sender. One bucket is made ahead: the servers are paused in any case."""

    def __init__(self, settings: SenderSettings, device: torch.device) -> None:
        super().__init__(replace(settings, staged_bytes=0), device)

    def connect(self, servers: Sequence[WeightEndpoint]) -> None:
        """Connect to the servers. Raises ValueError for a server with pipeline stages (each handle may be opened once,
        and such a server would open it in every stage), or one that has no trainer rank on each of its GPUs."""
        for server in servers:
            if server.pp > 1:
                raise ValueError(
                    f"push.type=ipc: {server.name} has {server.pp} pipeline stages, only one of which can open the "
                    "trainer's memory; use p1 on the generator's side, or push.type=disk"
                )
            if len(server.trainer_ranks) != server.tp:
                raise ValueError(
                    f"push.type=ipc: {server.name} shares {len(server.trainer_ranks)} of its {server.tp} GPUs with the "
                    "trainer; it needs all of them; use push.type=nccl for separate GPUs"
                )
        self._servers = servers

    def send(self) -> SendReport | None:
        buckets = self._take_buckets()
        start, deadline = time.perf_counter(), Deadline(self._settings.timeout_seconds)
        handed: list[_Handed] = []
        for bucket in buckets:
            shared = self._everywhere(bucket)
            if shared is None:
                continue
            if handed:
                self._finish(handed[-1], deadline)
            handed.append(self._hand_over(shared, len(handed) + 1, deadline))
        if handed:
            self._finish(handed[-1], deadline)
        bucket = shared = None
        num_bytes = sum(one.num_bytes for one in handed)
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()
        if self._settings.rank != 0:
            return None
        compared = compare_checksums(self._servers, buckets.sent(num_bytes, len(handed)), deadline)
        seconds = time.perf_counter() - start
        return SendReport(seconds=seconds, num_bytes=num_bytes, num_buckets=len(handed), compared=compared)

    def close(self) -> None:
        """Do nothing: nothing is held between pushes."""

    def _everywhere(self, bucket: FlatBucket | None) -> FlatBucket | None:
        """Return rank 0's bucket on every rank."""
        if self._settings.world_size == 1:
            return bucket
        layout: list[Any] = [bucket and (bucket.names, bucket.dtypes, bucket.shapes, bucket.num_bytes)]
        dist.broadcast_object_list(layout, src=0, device=self._device)
        if layout[0] is None:
            return None
        names, dtypes, shapes, size = layout[0]
        flat = torch.empty(size, dtype=torch.uint8, device=self._device) if bucket is None else bucket.flat
        dist.broadcast(flat, src=0)
        return FlatBucket(names=names, dtypes=dtypes, shapes=shapes, flat=flat)

    def _hand_over(self, bucket: FlatBucket, number: int, deadline: Deadline) -> _Handed:
        """Let every server begin to copy a bucket; collective."""
        if bucket.flat.device.type == "cuda":
            torch.cuda.synchronize(bucket.flat.device)
        mine = next((server for server in self._servers if self._settings.rank in server.trainer_ranks), None)
        payload = None if mine is None else mine.share(bucket)
        payloads: list[str | None] = [payload]
        if self._settings.world_size > 1:
            payloads *= self._settings.world_size
            dist.all_gather_object(payloads, payload)

        def receive(server: WeightEndpoint, timeout_seconds: float) -> None:
            handles = [payloads[rank] or "" for rank in server.trainer_ranks]
            with span("copy", lane=f"copies of {server.name}", number=number):
                server.receive_shared(handles, timeout_seconds=timeout_seconds)

        answers = call_all(self._servers, receive, deadline) if self._settings.rank == 0 else {}
        return _Handed(number, bucket, answers)

    def _finish(self, handed: _Handed, deadline: Deadline) -> None:
        """Return on all ranks when every server has copied the bucket. Raises PushError on all of them."""
        outcome = [handed.outcome(deadline)]
        if self._settings.world_size > 1:
            dist.broadcast_object_list(outcome, src=0, device=self._device)
        if outcome[0] is not None:
            raise PushError(outcome[0])
        handed.release()


class _Handed:
    """A bucket that the servers copy."""

    def __init__(self, number: int, bucket: FlatBucket, answers: Mapping[str, Future[None]]) -> None:
        """`answers`: of the servers, on the rank that calls them."""
        self._number, self.num_bytes, self._answers = number, bucket.num_bytes, answers
        self._bucket: FlatBucket | None = bucket
        self._begin = time.perf_counter()

    def outcome(self, deadline: Deadline) -> str | None:
        """Wait for the servers; return what failed, for all ranks to raise."""
        try:
            deadline.wait(self._answers, f"bucket {self._number} of the weight push")
        except (PushError, GeneratorCallError, GeneratorGone) as e:
            return str(e)
        return None

    def release(self) -> None:
        """Let the bucket's memory be used again."""
        self._bucket = None
        seconds = time.perf_counter() - self._begin
        add_span("bucket", seconds, lane="buckets", number=self._number, bytes=self.num_bytes)
