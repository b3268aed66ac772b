"""RMSNorm and SwiGLU on CPU with their own backward passes; leaf functions of cpu/layers.py and cpu/device.py.

Memory traffic is what they cost: each saves its input only, and passes over memory a third as often as the formula
written with torch's operators. Invariant: same value and gradient as that formula.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float() if x.dtype == torch.bfloat16 else x
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
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
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
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
