"""SwiGLU of dense MLPs on GPUs, in TransformerEngine's kernels.

Megatron's own are compiled by torch in every process, which takes seconds of the first update, and again for other
numbers of tokens. Invariant: the signature is that of Megatron's bias_swiglu_impl().
"""

from __future__ import annotations

import torch
import transformer_engine.pytorch  # noqa: F401 (loads the library of transformer_engine_torch)
import transformer_engine_torch as kernels
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_adapter.autograd import Context


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
