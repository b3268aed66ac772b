"""RMSNorm, SwiGLU and float32 matrix products on CPU; leaf functions of cpu/layers.py and cpu/device.py.

RMSNorm and SwiGLU save their input only, and pass over memory a third as often as the formula written with torch's
operators. Invariant: same value and gradient as that formula. torch calls MKL for float32 products, which uses AVX-512
on Intel's processors only; oneDNN does on all that have it, and takes half the time on an AMD EPYC.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_adapter.autograd import Context


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float() if x.dtype == torch.bfloat16 else x
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        if x.dtype == torch.bfloat16:
            wide, grad = x.float(), grad.float()
        else:
            wide = x
        unit = wide * scale  # [..., h]
        grad_weight = (grad * unit).flatten(0, -2).sum(0)
        grad_unit = grad * weight
        along = (grad_unit * unit).mean(-1, keepdim=True)
        grad_x = torch.addcmul(grad_unit, unit, along, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight for x [..., h] and weight [h], normalized in float32."""
    return _RMSNorm.apply(x, weight, eps)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:  # type: ignore[override]
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(grad, activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return out


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up of x [..., 2 f] (gate, then up): [..., f]."""
    return _SwiGLU.apply(gate_up)


_SMALL = 2**22
"""Products with fewer terms stay with torch: making oneDNN's kernel for new sizes takes longer."""

_library: Any = None
"""What it replaces is replaced as long as it exists."""


def use_onednn() -> None:
    """Let oneDNN compute torch.mm, and what torch computes with it, from now on, in float32 on the CPU."""
    global _library
    if _library is None and torch.backends.mkldnn.is_available():
        _library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings(action="ignore"):  # that torch's own kernel is replaced
            _library.impl("mm", mm, "CPU")


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Compute a b for a [m, k] and b [k, n]: [m, n], contiguous. Raises as torch.mm."""
    if not (_is_dense(a) and _is_dense(b) and a.shape[1] == b.shape[0] and len(a) * b.numel() >= _SMALL):
        return torch.mm(a, b, out=a.new_empty(0))
    if a.is_contiguous() or len(a) <= b.shape[1]:
        return _linear(a, b.t())
    return _linear(b.t(), a).t().contiguous()  # a left factor that is not contiguous is copied: here the smaller one


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def _is_dense(x: Tensor) -> bool:
    """Return whether this is a matrix in float32 that lies in memory row by row, or column by column."""
    return x.dim() == 2 and x.dtype == torch.float32 and (x.is_contiguous() or x.t().is_contiguous())
