"""Weight push into servers on the trainer's own GPUs: each rank shares memory with the server beside it.

Every rank of the trainer has the full tensors. It copies buckets in turn into two pieces of device memory. The server
on its GPU opens each piece at its first bucket, and copies from it to its weights. Where there is no device memory to
share (CPU), the bytes themselves are sent. While the servers copy a bucket, the ranks gather the next one.
Invariant: a piece of memory is written when every server has copied what was in it, and read when every rank has
written it; the servers answer when their copies are complete.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from core.weight_sync.buckets import BucketSender, compare_checksums
from core.weight_sync.push import Deadline, PushError, SenderSettings, SendReport, call_all
from rollout.bucket import FlatBucket
from rollout.errors import GeneratorCallError, GeneratorGone
from rollout.inference.backend import WeightEndpoint
from tracing import add_span, span


class IpcSender(BucketSender):
    """See core.weight_sync.buckets.Sender. One bucket is made ahead: the servers are paused in any case."""

    def __init__(self, settings: SenderSettings) -> None:
        super().__init__(replace(settings, staged_bytes=0))
        self._shares_memory = settings.device.startswith("cuda")

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
        memory = _Memory(self._settings.bucket_bytes)
        copying, num_bytes, num_buckets = _Calls(), 0, 0
        for bucket in buckets:
            if bucket is None:  # on every rank
                continue
            place = num_buckets % 2
            new = memory.write(bucket, place) if self._shares_memory else bucket.flat
            self._meet(copying, deadline)
            num_bytes, num_buckets = num_bytes + bucket.num_bytes, num_buckets + 1
            copying = self._hand_over(bucket, new, place, num_buckets, deadline)
            del bucket, new  # while the next one is gathered
        self._meet(copying, deadline)
        self._release(memory, deadline)
        if self._settings.rank != 0:
            return None
        compared = compare_checksums(self._servers, buckets, deadline)
        seconds = time.perf_counter() - start
        return SendReport(seconds=seconds, num_bytes=num_bytes, num_buckets=num_buckets, compared=compared)

    def close(self) -> None:
        """Do nothing: nothing is held between pushes."""

    def _meet(self, calls: _Calls, deadline: Deadline) -> None:
        """Return on all ranks when the calls have been answered and every rank's device has done what it was given.
        Raises PushError on all of them."""
        failure = calls.failure(deadline)
        if self._settings.world_size > 1:
            failed = torch.tensor([failure is not None], dtype=torch.int32, device=self._device)
            dist.all_reduce(failed)
            if failed.item():
                reason = [failure]
                dist.broadcast_object_list(reason, src=0, device=self._device)
                failure = reason[0]
        elif self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if failure is not None:
            raise PushError(failure)

    def _hand_over(self, bucket: FlatBucket, new: Tensor | None, place: int, number: int, deadline: Deadline) -> _Calls:
        """Let every server begin to copy a bucket from the memory `place`; collective where that is `new` to them."""
        if new is not None:
            shared = self._shared_by_all(bucket, new, place)
        if self._settings.rank != 0:
            return _Calls()
        handed = {
            server.name: [server.share(bucket, None, number=place)] * server.tp
            if new is None
            else [shared[rank] for rank in server.trainer_ranks]
            for server in self._servers
        }

        def receive(server: WeightEndpoint, timeout_seconds: float) -> None:
            with span("copy", lane=f"copies of {server.name}", number=number):
                server.receive_shared(handed[server.name], timeout_seconds=timeout_seconds)

        what = f"bucket {number} of the weight push"
        return _Calls(call_all(self._servers, receive, deadline), what, number=number, bytes=bucket.num_bytes)

    def _shared_by_all(self, bucket: FlatBucket, new: Tensor, place: int) -> list[str]:
        """Return what every rank shares with the server beside it; empty where there is none. Collective."""
        mine = next((server for server in self._servers if self._settings.rank in server.trainer_ranks), None)
        own = "" if mine is None else mine.share(bucket, new, number=place)
        shared = [own] * self._settings.world_size
        if self._settings.world_size > 1:
            dist.all_gather_object(shared, own)
        return shared

    def _release(self, memory: _Memory, deadline: Deadline) -> None:
        """Free the memory, on all ranks, when the servers have closed it."""
        if not self._shares_memory:
            return
        calls = _Calls()
        if self._settings.rank == 0:
            answers = call_all(self._servers, lambda s, left: s.release_shared(timeout_seconds=left), deadline)
            calls = _Calls(answers, "the end of the weight push")
        self._meet(calls, deadline)
        memory.free()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()


class _Memory:
    """Two pieces of device memory of this rank."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes`: of each, unless a bucket is larger, or so small that it is probably the only one."""
        self._num_bytes = num_bytes
        self._pieces: dict[int, Tensor] = {}

    def write(self, bucket: FlatBucket, place: int) -> Tensor | None:
        """Copy a bucket into the memory `place`. Return it for the servers to open; None if they have opened it."""
        piece = self._pieces.get(place)
        fits = piece is not None and piece.numel() >= bucket.num_bytes
        if piece is None or not fits:
            size = bucket.num_bytes
            if size > self._num_bytes // 2:
                size = max(size, self._num_bytes)
            piece = self._pieces[place] = torch.empty(size, dtype=torch.uint8, device=bucket.flat.device)
        piece[: bucket.num_bytes].copy_(bucket.flat)
        return None if fits else piece

    def free(self) -> None:
        self._pieces.clear()


class _Calls:
    """Calls that the servers have not answered yet; none on ranks that do not call."""

    def __init__(self, answers: Mapping[str, Future[None]] | None = None, what: str = "", **bucket: int) -> None:
        """`what`: their purpose. `bucket`: details of the bucket that the servers copy."""
        self._answers, self._what, self._bucket = answers or {}, what, bucket
        self._begin = time.perf_counter()

    def failure(self, deadline: Deadline) -> str | None:
        """Wait for all servers, also after a failure of one: a call that arrives late would write old weights into the
        repetition. Return what failed, for all ranks to raise."""
        try:
            deadline.wait(self._answers, self._what)
        except (PushError, GeneratorCallError, GeneratorGone) as e:
            wait_for_all(self._answers.values(), timeout=deadline.left())
            return str(e)
        if self._bucket:
            add_span("bucket", time.perf_counter() - self._begin, lane="buckets", **self._bucket)
        return None
