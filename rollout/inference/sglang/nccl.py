"""Buckets of weights by broadcast: the calls that announce one to a SGLang server, and how the server receives it.

The sender's loop is core/weight_sync/nccl.py. SGLang itself makes every tensor of a bucket and concatenates them before
it receives over them, and receives nothing while it copies; here a bucket is received while the one before is copied.
Read by the server's processes too, so of this project nothing but the bucket is imported. Invariant: when a bucket
begins to arrive, at most one other is being copied.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rollout.bucket import FlatBucket
from rollout.inference.sglang.hooks.recorded_copies import Outcome, RecordedCopies, WeightUpdater, outcome_of


def broadcast_call(bucket: FlatBucket, group: str) -> tuple[str, dict[str, object]]:
    """Return the call that receives this bucket as one broadcast from rank 0 of the group."""
    return "/update_weights_from_distributed", {
        "names": bucket.names,
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
        "shapes": bucket.shapes,
        "group_name": group,
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }


class BroadcastBuckets:
    """The broadcast buckets of one scheduler process."""

    def __init__(self, copies: RecordedCopies) -> None:
        self._copies = copies
        self._stream: torch.cuda.Stream | None = None
        """Broadcasts run in this stream."""
        self._ends: deque[torch.cuda.Event] = deque()
        """The ends of the copies of the last two buckets."""

    def receive(
        self,
        original: object,
        updater: WeightUpdater,
        names: Sequence[str],
        dtypes: Sequence[str | torch.dtype],
        shapes: Sequence[Sequence[int]],
        group_name: str,
    ) -> Outcome:
        """Receive a bucket in place of WeightUpdater._update_bucketed_weights_from_distributed; return (whether it
        succeeded, message). On a GPU the broadcast and the copies may be running when it returns."""

        def receive() -> None:
            formats = tuple(d if isinstance(d, torch.dtype) else getattr(torch, d) for d in dtypes)
            sizes = tuple(tuple(shape) for shape in shapes)
            num_bytes = sum(d.itemsize * math.prod(size) for d, size in zip(formats, sizes, strict=True))
            flat = self._broadcast(num_bytes, torch.device(updater.device), updater._model_update_group[group_name])
            bucket = FlatBucket(names=tuple(names), dtypes=formats, shapes=sizes, flat=flat)
            self._copies.load(updater.get_model(), bucket)
            if flat.is_cuda:
                self._ends.append(torch.cuda.current_stream().record_event())

        return outcome_of(receive)

    def _broadcast(self, num_bytes: int, device: torch.device, group: ProcessGroup) -> Tensor:
        """Return the bytes that rank 0 of the group sends; what the current stream does next waits for them."""
        if device.type != "cuda":
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            torch.distributed.broadcast(flat, src=0, group=group)
            return flat
        if len(self._ends) == 2:
            self._ends.popleft().synchronize()
        current = torch.cuda.current_stream()
        self._stream = self._stream or torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            torch.distributed.broadcast(flat, src=0, group=group)
        current.wait_stream(self._stream)
        flat.record_stream(current)  # read by the copies there, after this function's caller has dropped it
        return flat
