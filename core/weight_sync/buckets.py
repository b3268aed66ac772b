"""What the senders of the weight push have in common: buckets made ahead, calls to many servers at once, one deadline.

Every rank of the trainer has a sender. `prepare` runs while the generators continue sampling: it gathers, converts and
lays out as many buckets as fit. `send` runs while they are paused. Both are called on all ranks. Invariant: a sender
either finishes in time or raises, and names the servers that did not answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from core.weight_sync.formats import format_table, wrong_formats
from mcore_adapter.hf.block_fp8 import FP8, quantize_bucket
from model_specs.block_fp8 import SCALE
from rollout.inference.backend import Quantization, WeightEndpoint
from rollout.inference.bucket import FlatBucket

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.0003


class PushError(RuntimeError):
    """A weight push failed; the generators hold old and new weights mixed and must not continue. The message names the
    server and the cause."""


@dataclass(frozen=True, kw_only=True)
class SenderSettings:
    """Settings of every transport."""

    rank: int
    """Of the trainer; rank 0 has the full tensors and sends requests to the servers."""
    world_size: int
    dtype: torch.dtype
    """Format that the servers hold weights in."""
    timeout_seconds: float
    """For `send` as a whole, and for joining the servers."""
    bucket_bytes: int
    weight_format: Quantization = "auto"
    """fp8_block: weights of linear layers are quantized, once, on rank 0."""
    staged_bytes: int | None = None
    """Most bytes laid out before the pause. None: what the device has to spare."""


@dataclass(frozen=True, kw_only=True)
class SendReport:
    """What one `send` cost."""

    seconds: float
    num_bytes: int
    num_buckets: int
    compared: str = ""
    """Result of compare_checksums, where it was requested."""
    changed: float | None = None
    """Share of the values that have changed, where only those were sent."""


class Sender(Protocol):
    """The trainer's end of one transport."""

    def connect(self, servers: Sequence[WeightEndpoint]) -> None:
        """Connect once, when the servers are up."""
        ...

    def prepare(self, buckets: Iterator[Mapping[str, Tensor]], *, verify: bool) -> None:
        """Begin a push: `buckets` is collective, with full tensors on rank 0 and nothing elsewhere."""
        ...

    def send(self) -> SendReport | None:
        """Move everything; the servers are paused. The report on rank 0. Raises PushError."""
        ...

    def close(self) -> None: ...


class Buckets:
    """An iterator over what a push moves, in lockstep on all ranks: a flat bucket on rank 0, None elsewhere. Each step
    is collective, unless `stage` made its bucket ahead."""

    def __init__(
        self,
        source: Iterator[Mapping[str, Tensor]],
        settings: SenderSettings,
        device: torch.device,
        servers: Sequence[WeightEndpoint],
        *,
        verify: bool,
    ) -> None:
        """`device`: where the flat buckets lie. `verify`: the checksums of `servers` will be compared."""
        self._source, self._dtype, self._device = source, settings.dtype, device
        self.quantizes = settings.weight_format == "fp8_block"
        self._staged: deque[FlatBucket | None] = deque()
        compared = servers if verify and settings.rank == 0 else ()
        self.expected = {tp: server.expected_checksums() for tp, server in {s.tp: s for s in compared}.items()}
        """By tensor-parallel size of the servers: complete when the iterator is exhausted."""

    def stage(self, count: int) -> None:
        """Make up to `count` buckets ahead."""
        self._staged.extend(map(self._flat, islice(self._source, count)))

    def __iter__(self) -> Buckets:
        return self

    def __next__(self) -> FlatBucket | None:
        return self._staged.popleft() if self._staged else self._flat(next(self._source))

    def _flat(self, tensors: Mapping[str, Tensor]) -> FlatBucket | None:
        if not tensors:
            return None
        if self.quantizes:
            tensors = quantize_bucket(tensors)
        cast = {name: t.to(self._device, self._format(name, t)) for name, t in tensors.items()}
        for expected in self.expected.values():
            for name, tensor in cast.items():
                expected.add(name, tensor)
        return FlatBucket.of(cast)

    def _format(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the format that the servers hold a tensor in."""
        scales = self.quantizes and name.endswith(SCALE)
        keeps = tensor.dtype == FP8 or scales or not tensor.is_floating_point()
        return tensor.dtype if keeps else self._dtype


def buckets_to_stage(settings: SenderSettings, device: torch.device) -> int:
    """Return how many buckets fit ahead, at least one: rank 0's answer, on every rank."""
    spare = settings.staged_bytes
    if spare is None and device.type == "cuda":
        # Half of what is free (the allocator's own reserve included): the rest is for the gathering itself and for
        # the copies inside a colocated server.
        free = torch.cuda.mem_get_info(device)[0]
        spare = (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)) // 2
    elif spare is None:
        spare = 1 << 62
    count = [max(1, spare // settings.bucket_bytes)]
    if settings.world_size > 1:
        dist.broadcast_object_list(count, src=0, device=device)
    return count[0]


class BucketSender:
    """The part of a Sender that lays out buckets in memory before the pause."""

    def __init__(self, settings: SenderSettings, device: torch.device) -> None:
        self._settings, self._device = settings, device
        self._servers: Sequence[WeightEndpoint] = ()
        self._buckets: Buckets | None = None

    def prepare(self, buckets: Iterator[Mapping[str, Tensor]], *, verify: bool) -> None:
        """See Sender.prepare()."""
        self._buckets = Buckets(buckets, self._settings, self._device, self._servers, verify=verify)
        self._buckets.stage(buckets_to_stage(self._settings, self._device))

    def _take_buckets(self) -> Buckets:
        """Return what prepare() made, once. Raises PushError without prepare()."""
        buckets, self._buckets = self._buckets, None
        if buckets is None:
            raise PushError("send() without prepare()")
        return buckets


def compare_checksums(servers: Sequence[WeightEndpoint], buckets: Buckets, deadline: Deadline) -> str:
    """Compare every parameter of every server with what was sent, where requested; return the result as text. A server
    of several pipeline stages returns the checksums of its first one alone and is left out. Raises PushError."""
    if not buckets.expected:
        return ""
    left_out = [server.name for server in servers if server.pp > 1]
    for server in servers:
        if server.pp > 1:
            continue
        if buckets.quantizes:
            _compare_formats(server, buckets, deadline)
        wrong = buckets.expected[server.tp].mismatches(server.checksums(timeout_seconds=deadline.left()))
        if wrong:
            raise PushError(f"{server.name}: {len(wrong)} parameters differ from what was sent: {', '.join(wrong[:5])}")
    if not left_out:
        return "all checksums equal"
    equal = "no checksums compared" if len(left_out) == len(servers) else "all other checksums equal"
    return f"{equal}: {', '.join(left_out)} with pipeline stages cannot compute them"


def _compare_formats(server: WeightEndpoint, buckets: Buckets, deadline: Deadline) -> None:
    """Log the formats of all tensors as sent and as held. Raises PushError where one is not as it ought to be."""
    rows = buckets.expected[server.tp].formats(server.formats(timeout_seconds=deadline.left()))
    if wrong := list(wrong_formats(rows)):
        raise PushError(f"{server.name}: {len(wrong)} tensors in a wrong format: {'; '.join(wrong[:5])}")
    logger.info("Formats of the weights as sent, and as %s holds them:\n%s", server.name, format_table(rows))


class Deadline:
    """One time limit for all steps of a push."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, time.monotonic() + seconds

    def left(self) -> float:
        return max(0.001, self._end - time.monotonic())

    def wait(self, pending: Mapping[str, Future[Any]], what: str, *, also: Callable[[], bool] = lambda: True) -> None:
        """Return when all futures are done and `also()` holds. Raises the first failure at once, and PushError with
        the names of those that did not answer when the time is over."""
        while True:
            left = [name for name, future in pending.items() if not _is_done(future)]
            if not left and also():
                return
            if time.monotonic() > self._end:
                raise PushError(
                    f"{what}: no answer within push.timeout_seconds={self._seconds:g} from "
                    f"{', '.join(left) or 'the sender, although every server responded'}"
                )
            time.sleep(_POLL_SECONDS)


def _is_done(future: Future[Any]) -> bool:
    if not future.done():
        return False
    future.result()
    return True


def in_background(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Run in a thread that does not prevent the process from exiting: it may hang on a server that is gone."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as e:  # noqa: BLE001 (handed over to whoever waits)
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return future


def call_all(
    servers: Sequence[WeightEndpoint], call: Callable[[WeightEndpoint, float], Any], deadline: Deadline
) -> dict[str, Future[Any]]:
    """Run `call(server, timeout_seconds)` on many servers at once; return server name -> future of its answer."""
    left = deadline.left()
    return {server.name: in_background(call, server, left + 5) for server in servers}
