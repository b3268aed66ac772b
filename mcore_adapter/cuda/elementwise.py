"""Sums of gradients and SwiGLU of dense MLPs on GPUs, in a kernel of this project and those of TransformerEngine.

torch adds a bfloat16 gradient to a float32 sum element by element, which takes twice the time that the memory needs;
add_to() reads and writes 16 bytes at a time.
"""

from __future__ import annotations

import torch
import transformer_engine.pytorch  # noqa: F401 (loads the library of transformer_engine_torch)
import transformer_engine_torch as kernels
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_adapter.autograd import Context

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


class _SwiGLU(torch.autograd.Function):
    """Saves its input only."""

    @staticmethod
    def forward(ctx: Context, halves: Tensor) -> Tensor:
        ctx.save_for_backward(halves)
        product: Tensor = kernels.swiglu(halves, None)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        (halves,) = ctx.saved_tensors
        grad_halves: Tensor = kernels.dswiglu(grad.contiguous(), halves, None)
        return grad_halves


def bias_swiglu(halves: Tensor, bias: Tensor | None, *_: object) -> Tensor:
    """Compute silu(first) * second of halves [..., 2 * f], in fp32 and rounded once: [..., f]. No bias."""
    assert bias is None, "no supported family has a bias here"
    product: Tensor = _SwiGLU.apply(halves.view(-1, halves.shape[-1]))
    return product.view(*halves.shape[:-1], -1)


bias_swiglu.__wrapped__ = kernels.swiglu  # type: ignore[attr-defined]  # what computes it, as inspect.unwrap() finds
