"""Drawing tokens, and top_k and top_p without sorting the vocabulary, inside a SGLang server (see hooks.py).

The smallest probability that stays is found by bisection over the bits of floats: for numbers that are not negative,
their order is that of their bits. 31 passes over a row are a few times less work on a GPU than a sort of it, and what
is left out never travels to the host. Stands alone: nothing of this project is imported.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # on the CPU there may be none
    triton = None

_BITS_OF_ONE = 0x3F800000
_BLOCK = 4096


def draw(probs: Tensor) -> Tensor:
    """Draw one column of each row, with probabilities proportional to `probs` [n, v] float32, none of them negative,
    some of each row positive: [n] int32. The smallest of exponential variables with these rates wins, as in
    torch.multinomial(), which first checks the probabilities in ten more passes over the matrix."""
    clocks = torch.empty_like(probs).exponential_()
    return torch.div(probs, clocks, out=clocks).argmax(-1).to(torch.int32)


def keep_most_likely(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set everything outside of the top_k most likely columns to zero, in place, and among these everything outside of
    the smallest set that holds top_p of their probability; columns as likely as the last one that stays, stay.

    probs [n, v] float32, top_k [n] int32 (>= v: no limit), top_p [n] float32. Returns what is left of each row, [n]."""
    if probs.is_cuda and triton is not None:
        assert probs.stride(1) == 1, "columns next to each other"
        kept = torch.empty(len(probs), dtype=torch.float32, device=probs.device)
        _keep_most_likely[(len(probs),)](
            probs, top_k, top_p, kept, probs.shape[1], probs.stride(0), ONE=_BITS_OF_ONE, BLOCK=_BLOCK, num_warps=8
        )
        return kept
    ordered = probs.sort(dim=-1, descending=True).values
    last = top_k.long().clamp(max=probs.shape[1])[:, None] - 1
    mass = torch.where(ordered >= ordered.gather(1, last), ordered, 0.0)
    before = mass.cumsum(-1) - mass
    stays = (before < top_p[:, None] * mass.sum(-1, keepdim=True)) & (mass > 0)
    stays[:, 0] = True
    least = torch.where(stays, ordered, torch.inf).amin(-1, keepdim=True)
    probs.masked_fill_(probs < least, 0.0)
    return probs.sum(-1)


if triton is not None:

    @triton.jit
    def _count(row, least, width, BLOCK: tl.constexpr):
        total = tl.zeros([BLOCK], tl.int32)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < width, other=0.0)
            total += ((x.to(tl.int32, bitcast=True) >= least) & (at < width)).to(tl.int32)
        return tl.sum(total)

    @triton.jit
    def _mass(row, least, width, BLOCK: tl.constexpr):
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < width, other=0.0)
            total += tl.where(x.to(tl.int32, bitcast=True) >= least, x, 0.0)
        return tl.sum(total)

    @triton.jit
    def _keep_most_likely(probs, top_k, top_p, kept, width, stride, ONE: tl.constexpr, BLOCK: tl.constexpr):
        index = tl.program_id(0)
        row = probs + index.to(tl.int64) * stride
        k = tl.load(top_k + index)
        p = tl.load(top_p + index)
        least = tl.full([], 0, tl.int32)  # the largest bits that enough columns reach; too few reach `over`
        if k < width:
            over = tl.full([], ONE + 2, tl.int32)
            while over - least > 1:
                middle = (least + over) // 2
                if _count(row, middle, width, BLOCK) >= k:
                    least = middle
                else:
                    over = middle
        mass = _mass(row, least, width, BLOCK)
        if p < 1.0:
            over = tl.full([], ONE + 2, tl.int32)
            while over - least > 1:
                middle = (least + over) // 2
                if _mass(row, middle, width, BLOCK) >= p * mass:
                    least = middle
                else:
                    over = middle
            mass = _mass(row, least, width, BLOCK)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < width, other=0.0)
            stays = x.to(tl.int32, bitcast=True) >= least
            tl.store(row + at, tl.where(stays, x, 0.0), mask=at < width)
        tl.store(kept + index, mass)
