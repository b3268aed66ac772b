"""A checksum of every parameter that the sender can compute too, whatever the device.

Read by the server's processes, so nothing else of this project is imported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MULTIPLIER = -7046029254386353131  # an odd 64-bit constant (the golden ratio's), as a signed number
CHECKSUM_CHUNK = 1 << 24
"""Elements whose checksum is computed at a time."""


def position_checksum(tensor: Tensor, start: int = 0) -> Tensor:
    """Sum bits x weight(position) over the elements, modulo 2^64: [] int64. Positions count from `start`.

    Additive, so the checksum of a fused tensor is the sum over its parts; zeros (padding) add nothing. Exact on any
    device: integers only."""
    bits = as_bits(tensor)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.numel(), CHECKSUM_CHUNK):
        part = bits[begin : begin + CHECKSUM_CHUNK].to(torch.int64)
        positions = torch.arange(start + begin, start + begin + part.numel(), device=part.device)
        total += (part * position_weights(positions)).sum()
    return total


def as_bits(tensor: Tensor) -> Tensor:
    """Return the elements as integers: [n]."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def position_weights(positions: Tensor) -> Tensor:
    """Return the odd number by which position_checksum() multiplies the bits at each position; int64, as they are."""
    weight = positions * _MULTIPLIER
    return (weight ^ (weight >> 29)) | 1


def answer_check(original: Callable[..., object], checker: Any, action: str, *args: object, **kwargs: object) -> object:
    """Compute the checksum in place of WeightChecker.handle, whose hash needs a GPU, on the sender's side too; or
    return the formats of the parameters in its place."""
    if action not in ("checksum", "formats"):
        return original(checker, action, *args, **kwargs)
    named = dict(checker._get_model().named_parameters())
    if action == "formats":
        checksums = {name: str(p.dtype).removeprefix("torch.") for name, p in named.items()}
    else:
        sums = torch.stack([position_checksum(p) for p in named.values()]).tolist()
        checksums = {name: str(value) for name, value in zip(named, sums, strict=True)}
    return {
        "checksums": checksums,
        "per_gpu_checksum": hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest(),
        "parallelism_info": checker._parallelism_info().model_dump(),
    }
