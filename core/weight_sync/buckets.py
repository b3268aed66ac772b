"""The common part of the senders of the weight push: buckets that are made ahead, and the comparison of what was sent
with what the servers hold.

Every rank of the trainer has a Sender; the first rank sends, and the others take part in gathering. `prepare` runs
while generators on other GPUs continue sampling: it gathers, converts and lays out as many buckets as fit, or one where
the generators share the GPUs. `send` runs while they are paused. Both are called on all ranks. Invariant: a sender
either finishes in time or raises, and names the servers that did not answer.

Checksums are compared, and the formats of FP8 servers. A tensor that should be FP8 and is not is an error, on either
side: a server may copy bfloat16 values into FP8 parameters without an error, and keep their old scales.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from core.weight_sync.push import Deadline, PushError, SenderSettings, SendReport
from mcore_adapter.hf.safetensors_folder import dtype_of
from model_specs.weight_files import BLOCK, SCALE, is_quantized
from rollout.bucket import FlatBucket
from rollout.errors import GeneratorCallError, GeneratorGone
from rollout.inference.backend import TensorFormat, WeightEndpoint
from rollout.plugins import find_plugin
from tracing import add_span

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Of a block of zeros, or of values so small that their quotient would not be a normal number."""
_AT_ONCE = 1 << 27
"""Elements that are quantized by one kernel; each of their float32 copies takes 0.5 GiB."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize matrices [..., out, in]: float8_e4m3fn of that shape, and scales [..., ceil(out / 128), ceil(in / 128)]
    float32.

    In each block of 128 x 128, scale = max |w| / 448 and value = w / scale, rounded to nearest; w is about value *
    scale. DeepSeek-V3's `weight_dequant` reads this, and DeepGEMM's `per_block_cast_to_fp8` writes it, with scales of
    at least 1e-4 / 448.
    """
    *lead, rows, columns = weight.shape
    if rows % BLOCK or columns % BLOCK:
        weight = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = weight.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., out / 128, 128, in / 128, 128]
    largest = blocks.abs().amax((-3, -1), keepdim=True).float()  # exact in any format
    scale = (largest / LARGEST).clamp_min(_SMALLEST_SCALE)
    values = (blocks / scale).to(FP8).flatten(-4, -3).flatten(-2, -1)  # divided in float32, whatever the format
    return values[..., :rows, :columns].contiguous(), scale.squeeze(-1).squeeze(-2)


def quantize_bucket(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a bucket with each weight of a linear layer in FP8, and its scales beside it; the rest as it is. Matrices
    of one shape, such as experts, are quantized together."""
    groups: dict[torch.Size, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if is_quantized(name):
            groups[tensor.shape].append(name)
    quantized: dict[str, tuple[Tensor, Tensor]] = {}
    for shape, names in groups.items():
        step = max(1, _AT_ONCE // shape.numel())
        for start in range(0, len(names), step):
            some = names[start : start + step]
            if len(some) == 1:
                quantized[some[0]] = quantize(tensors[some[0]])
                continue
            values, scales = quantize(torch.stack([tensors[name] for name in some]))
            quantized |= {name: (values[i], scales[i]) for i, name in enumerate(some)}
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in quantized:
            result[name], result[name + SCALE] = quantized[name]
        else:
            result[name] = tensor
    return result


logger = logging.getLogger(__name__)


class Sender(Protocol):
    """The trainer's end of one transport."""

    def connect(self, servers: Sequence[WeightEndpoint]) -> None:
        """Connect once, when the servers are up."""
        ...

    def prepare(self, buckets: Iterator[Mapping[str, Tensor]], *, verify: bool) -> None:
        """Begin a push: `buckets` is collective, with full tensors on the ranks that get them and nothing elsewhere."""
        ...

    def send(self) -> SendReport | None:
        """Move everything; the servers are paused. The report on the first rank. Raises PushError."""
        ...

    def close(self) -> None: ...


SENDERS: Mapping[str, str] = {
    "nccl": "core.weight_sync.nccl:NcclSender",
    "ipc": "core.weight_sync.ipc:IpcSender",
    "disk": "core.weight_sync.disk:DiskSender",
}
"""Senders by transport, which rollout/inference/registry.py chooses. Local pushes have none."""


def make_sender(settings: SenderSettings) -> Sender:
    """Return the sender of this rank for the transport of the settings."""
    made: Sender = find_plugin(SENDERS[settings.type], kind="transport")(settings)
    return made


class Buckets:
    """An iterator over what a push moves, in lockstep on all ranks: flat buckets on the ranks that get full tensors,
    None elsewhere. Each step is collective, unless `stage` made its bucket ahead."""

    def __init__(
        self,
        source: Iterator[Mapping[str, Tensor]],
        settings: SenderSettings,
        servers: Sequence[WeightEndpoint],
        *,
        verify: bool,
    ) -> None:
        """`verify`: the checksums of `servers` will be compared."""
        self._source, self._dtype, self._device = source, getattr(torch, settings.dtype), torch.device(settings.device)
        self.quantizes = settings.quantizes
        self.staged: deque[FlatBucket | None] = deque()
        """Buckets that are made and not taken."""
        compared = servers if verify and settings.rank == 0 else ()
        self.expected = {tp: server.expected_checksums() for tp, server in {s.tp: s for s in compared}.items()}
        """Expected checksums by tensor-parallel size of the servers: complete when the iterator is exhausted."""

    def stage(self, count: int) -> None:
        """Make up to `count` buckets ahead."""
        self.staged.extend(map(self._flat, islice(self._source, count)))

    def __iter__(self) -> Buckets:
        return self

    def __next__(self) -> FlatBucket | None:
        if self.staged:
            return self.staged.popleft()
        begin, tensors = time.perf_counter(), next(self._source)
        bucket = self._flat(tensors)
        add_span("gather", time.perf_counter() - begin, lane="gathering")
        return bucket

    def _flat(self, tensors: Mapping[str, Tensor]) -> FlatBucket | None:
        if not tensors:
            return None
        if self.quantizes:
            tensors = quantize_bucket(tensors)
        cast = {name: t.to(self._device, self._format(name, t)) for name, t in tensors.items()}
        for expected in self.expected.values():
            expected.add(cast)
        return FlatBucket.of(cast)

    def _format(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the format that the servers hold a tensor in."""
        scales = self.quantizes and name.endswith(SCALE)
        keeps = tensor.dtype == FP8 or scales or not tensor.is_floating_point()
        return tensor.dtype if keeps else dtype_of(name, self._dtype)


def buckets_to_stage(settings: SenderSettings) -> int:
    """Return how many buckets fit ahead on the rank that sends, at least one."""
    device = torch.device(settings.device)
    spare = 1 << 62 if settings.staged_bytes is None else settings.staged_bytes
    if settings.staged_bytes is None and device.type == "cuda":
        # Half of what is free (the allocator's own reserve included): the rest is for the gathering itself.
        free = torch.cuda.mem_get_info(device)[0]
        spare = (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)) // 2
    count = [max(1, spare // settings.bucket_bytes)]
    if settings.staged_bytes is not None or settings.world_size == 1:
        return count[0]
    dist.broadcast_object_list(count, src=0, device=device)
    return count[0]


class BucketSender:
    """The part of a Sender that lays out buckets in memory before the pause."""

    def __init__(self, settings: SenderSettings) -> None:
        self._settings, self._device = settings, torch.device(settings.device)
        self._servers: Sequence[WeightEndpoint] = ()
        self._buckets: Buckets | None = None

    def prepare(self, buckets: Iterator[Mapping[str, Tensor]], *, verify: bool) -> None:
        """See Sender.prepare()."""
        self._buckets = Buckets(buckets, self._settings, self._servers, verify=verify)
        self._buckets.stage(buckets_to_stage(self._settings))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what gathers and quantizes would else run in the pause

    def _take_buckets(self) -> Buckets:
        """Return what prepare() made, once. Raises PushError without prepare()."""
        buckets, self._buckets = self._buckets, None
        if buckets is None:
            raise PushError("send() without prepare()")
        return buckets


_NAMED = 5
FP8_NAME, SCALE_NAME = "float8_e4m3fn", "float32"
_TIED = "lm_head.weight"
"""Held once, with the embedding, where the two are tied."""


def compare_checksums(servers: Sequence[WeightEndpoint], sent: Buckets, deadline: Deadline) -> str:
    """Compare every parameter of every server with what was sent, where requested; return the result as text. A server
    of several pipeline stages returns the checksums of its first one alone and is left out. Raises PushError."""
    if not sent.expected:
        return ""
    left_out = [server.name for server in servers if server.pp > 1]
    wrong: dict[str, list[str]] = {}
    for server in servers:
        if server.pp > 1:
            continue
        try:
            if sent.quantizes:
                _compare_formats(server, sent, deadline)
            checksums = server.checksums(timeout_seconds=deadline.left())
        except (GeneratorCallError, GeneratorGone) as error:
            raise PushError(str(error), servers=[server.name]) from error
        found = sent.expected[server.tp].mismatches(checksums)
        if found:
            wrong[server.name] = found
    if wrong:
        differing = (
            f"{name}: {len(found)} parameters differ from what was sent: {', '.join(found[:_NAMED])}"
            for name, found in wrong.items()
        )
        raise PushError("; ".join(differing), servers=[*wrong])
    if not left_out:
        return "all checksums equal"
    equal = "no checksums compared" if len(left_out) == len(servers) else "all other checksums equal"
    return f"{equal}: {', '.join(left_out)} with pipeline stages cannot compute them"


def _compare_formats(server: WeightEndpoint, sent: Buckets, deadline: Deadline) -> None:
    """Log the formats of all tensors as sent and as held. Raises PushError where one is not as it ought to be."""
    rows = sent.expected[server.tp].formats(server.formats(timeout_seconds=deadline.left()))
    if wrong := list(wrong_formats(rows)):
        raise PushError(
            f"{server.name}: {len(wrong)} tensors in a wrong format: {'; '.join(wrong[:_NAMED])}", servers=[server.name]
        )
    logger.info("Formats of the weights as sent, and as %s holds them:\n%s", server.name, format_table(rows))


def wrong_formats(rows: Sequence[TensorFormat]) -> Iterator[str]:
    """Yield a message for each tensor that is not held as it was sent, or not in the format that it ought to have."""
    if not any(is_quantized(row.name) for row in rows):
        yield f"no tensor ought to be {FP8_NAME}"
    for row in rows:
        ought = FP8_NAME if is_quantized(row.name) else SCALE_NAME if row.name.endswith(SCALE) else row.sent
        if row.sent != ought:
            yield f"{row.name} was sent as {row.sent}, not as {ought}"
        elif row.held != row.sent and not (row.held is None and row.name == _TIED):
            yield f"{row.name} was sent as {row.sent}, {row.parameter} is {row.held or 'missing'}"


def format_table(rows: Sequence[TensorFormat]) -> str:
    """Return one line for each kind of tensor: how many, their name with * for numbers, both formats."""

    def kind(name: str) -> str:
        return re.sub(r"\.\d+(?=\.)", ".*", name)

    lines = Counter((kind(row.name), row.sent, kind(row.parameter), row.held or "tied") for row in rows)
    cells = [("count", "tensor", "sent as", "parameter of the server", "held as")]
    cells += [(str(count), *line) for line, count in lines.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)
