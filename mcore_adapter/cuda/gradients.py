"""Addition of a bfloat16 gradient to a float32 sum: torch's reads and writes operands of different formats element by
element, which takes twice the time that the memory needs; this one reads and writes 16 bytes at a time."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192


@triton.jit
def _add_kernel(total, summand, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    sums = tl.load(total + places, mask=inside) + tl.load(summand + places, mask=inside).to(tl.float32)
    tl.store(total + places, sums, mask=inside)


def add_to(total: Tensor, summand: Tensor) -> None:
    """Add the summand to `total`, contiguous float32 of the same shape, in place: bit-equal to total.add_(summand)."""
    count = total.numel()
    _add_kernel[(triton.cdiv(count, _BLOCK),)](total, summand.contiguous(), count, BLOCK=_BLOCK, num_warps=8)
