"""Weight push over a process group of a sending rank and all ranks of all servers: one broadcast a bucket.

For trainers and generators on GPUs of their own. The first rank sends everything. While a bucket is in flight the next
one is gathered, laid out and announced to the servers. A server that refuses an update leaves the broadcast waiting for
it, so every answer is watched, and a failure or the deadline aborts the communicator.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from core.processes.meeting import LOOPBACK, Gate, from_hosts, listen, served_store
from core.weight_sync.buckets import Buckets, BucketSender, compare_checksums
from core.weight_sync.push import SENDER, Deadline, PushError, SenderSettings, SendReport, call_all, in_background
from rollout.bucket import FlatBucket, join_group
from rollout.inference.backend import GroupMembership, WeightEndpoint
from tracing import add_span

logger = logging.getLogger(__name__)

_groups = itertools.count()


class NcclSender(BucketSender):
    """See core.weight_sync.buckets.Sender. On the CPU the group is one of gloo."""

    def __init__(self, settings: SenderSettings) -> None:
        """Raises ValueError for an environment in which the first broadcast would hang."""
        if settings.device.startswith("cuda") and os.environ.get("NCCL_CUMEM_ENABLE") != "0":
            raise ValueError(
                f"NCCL_CUMEM_ENABLE={os.environ.get('NCCL_CUMEM_ENABLE', '(unset)')} in the trainer's ranks must be 0, "
                "as in the generators' servers; otherwise the first weight update fails on the servers and hangs here"
            )
        super().__init__(settings)
        self._host = settings.host
        self._group: dist.ProcessGroup | None = None
        self._gate: Gate | None = None
        self._name = f"slipstream-{os.getpid()}-{next(_groups)}"
        self._not_sent: Iterable[object] = ()

    def connect(self, servers: Sequence[WeightEndpoint]) -> None:
        """Make the group: this rank is 0 of it, then the servers' tensor-parallel ranks in order. Raises ValueError
        for a server with pipeline stages (the ranks of a group are counted by tensor parallelism alone), PushError
        or GeneratorCallError when one does not join."""
        for server in servers:
            if server.pp > 1:
                raise ValueError(
                    f"push.type=nccl: {server.name} has {server.pp} pipeline stages, which cannot join one group "
                    "with the trainer; use p1 on the generator's side, or push.type=disk"
                )
        self._servers = servers
        if self._settings.rank == 0:
            self._join(Deadline(self._settings.timeout_seconds))

    def _join(self, deadline: Deadline) -> None:
        # The store must listen before the servers look for it; the group forms only when all have come.
        listener = listen(LOOPBACK, 0)
        port = listener.getsockname()[1]
        if self._host != LOOPBACK:  # for as long as the group lives: its members may connect again
            hosts = {self._host, *(server.host for server in self._servers)}
            self._gate = Gate(self._host, 0, port, check=from_hosts(hosts))
            port = self._gate.port
        world = 1 + sum(server.tp for server in self._servers)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        places, first = {}, 1
        for server in self._servers:
            places[server.name] = GroupMembership(
                name=self._name, host=self._host, port=port, first_rank=first, world_size=world, backend=backend
            )
            first += server.tp
        store = served_store(listener, world, timeout_seconds=deadline.left())
        joined = call_all(self._servers, lambda s, left: s.join_group(places[s.name], timeout_seconds=left), deadline)
        # The library's own timeout ends the process; it must come after the deadline has been noticed here.
        limit = timedelta(seconds=2 * deadline.left() + 60)
        group = in_background(join_group, store, self._name, backend=backend, rank=0, world=world, timeout=limit)
        deadline.wait(joined | {SENDER: group}, "joining the group of the weight push")
        self._group = group.result()

    def send(self) -> SendReport | None:
        buckets = self._take_buckets()
        if self._settings.rank != 0:
            deque(buckets, maxlen=0)  # takes part in the gathering
            return None
        start, deadline = time.perf_counter(), Deadline(self._settings.timeout_seconds)
        try:
            sent = self._send_all(buckets, deadline)
            compared = compare_checksums(self._servers, buckets, deadline)
        except BaseException:
            self._abort()
            self._not_sent = buckets
            raise
        return SendReport(
            seconds=time.perf_counter() - start,
            num_bytes=sum(broadcast.num_bytes for broadcast in sent),
            num_buckets=len(sent),
            compared=compared,
        )

    def _send_all(self, buckets: Buckets, deadline: Deadline) -> list[_Broadcast]:
        """Announce a bucket when every server has answered for the one before, which may still be on its way. The next
        one is made meanwhile: three exist then, so at least as many must have been made ahead."""
        at_once = 2 if len(buckets.staged) > 2 else 1
        sent: list[_Broadcast] = []
        for bucket in buckets:
            if bucket is None:
                continue
            if sent:
                sent[-1].wait_for_servers(deadline)
            for broadcast in sent[: len(sent) + 1 - at_once]:
                broadcast.finish(deadline)
            sent.append(self._broadcast(bucket, len(sent) + 1, deadline))
        for broadcast in sent:
            broadcast.finish(deadline)
        return sent

    def close(self) -> None:
        """Leave the group. The servers may be gone already. After a failure it is collective with the ranks that still
        take part in gathering."""
        deque(self._not_sent, maxlen=0)
        if self._gate is not None:
            self._gate.close()
        if self._group is None:
            return
        deadline = Deadline(min(10.0, self._settings.timeout_seconds))
        left = call_all(self._servers, lambda s, left: s.leave_group(self._name, timeout_seconds=left), deadline)
        for name, future in left.items():
            try:
                failure: BaseException | None = future.exception(timeout=deadline.left())
            except TimeoutError:
                failure = TimeoutError("no answer in time")
            if failure is not None:
                logger.warning("%s did not leave the process group of the weight push: %s", name, failure)
        # With a server that has exited it may wait for ever; then it is aborted.
        try:
            in_background(dist.destroy_process_group, self._group).result(timeout=10)
            self._group = None
        except (TimeoutError, RuntimeError):
            self._abort()

    def _broadcast(self, bucket: FlatBucket, number: int, deadline: Deadline) -> _Broadcast:
        """Send a bucket to every server; return at once."""

        def receive(server: WeightEndpoint, timeout_seconds: float) -> None:
            server.receive_bucket(bucket, group=self._name, timeout_seconds=timeout_seconds)

        answers = call_all(self._servers, receive, deadline)
        work = dist.broadcast(bucket.flat, src=0, group=self._group, async_op=True)
        return _Broadcast(number, bucket.num_bytes, answers, work)

    def _abort(self) -> None:
        """Free this rank from a collective that will never complete."""
        group, self._group = self._group, None
        if self._gate is not None:
            self._gate.close()
        if group is None:
            return
        logger.error("aborting the process group of the weight push")
        with suppress(TimeoutError):
            in_background(group._get_backend(self._device).abort).exception(timeout=30)


class _Broadcast:
    """A bucket that is being sent. A server answers when it has begun to receive it (on a GPU) or has its weights (on a
    CPU)."""

    def __init__(self, number: int, num_bytes: int, answers: Mapping[str, Future[None]], work: dist.Work) -> None:
        self._number, self.num_bytes, self._answers = number, num_bytes, answers
        self._work: dist.Work | None = work
        self._begin = time.perf_counter()

    def wait_for_servers(self, deadline: Deadline) -> None:
        """Return when every server has answered, so that all of them receive buckets in the same order. Raises
        PushError."""
        deadline.wait(self._answers, f"bucket {self._number} of the weight push")

    def finish(self, deadline: Deadline) -> None:
        """Return when the bucket has been sent. Raises PushError where that failed or takes too long."""
        if self._work is None:
            return
        deadline.wait(self._answers, f"bucket {self._number} of the weight push", also=self._work.is_completed)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PushError(f"bucket {self._number} of the weight push: {error}") from error
        self._work = None
        seconds = time.perf_counter() - self._begin
        lane = "odd buckets" if self._number % 2 else "even buckets"  # they overlap
        add_span("bucket", seconds, lane=lane, number=self._number, bytes=self.num_bytes)
