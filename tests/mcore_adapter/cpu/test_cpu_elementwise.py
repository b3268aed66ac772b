"""RMSNorm and SwiGLU on CPU against the formulas written with torch's operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_adapter.cpu.layers import rms_norm, swiglu


def plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def results(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The value and the gradient of every input, for a random gradient of the value."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    value = function(*leaves)
    value.backward(torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).to(value.dtype))
    return [value.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_value_and_gradients_are_those_of_the_formula(dtype: torch.dtype, rtol: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 1, 48, generator=generator).to(dtype)
    weight = torch.randn(48, generator=generator).to(dtype)
    pairs = [
        (results(plain_swiglu, x), results(swiglu, x)),
        (
            results(lambda x, w: plain_rms_norm(x, w, 1e-6), x, weight),
            results(lambda x, w: rms_norm(x, w, 1e-6), x, weight),
        ),
    ]
    for expected, got in pairs:
        for a, b in zip(expected, got, strict=True):
            assert b.dtype == dtype
            torch.testing.assert_close(b, a, rtol=rtol, atol=rtol)


def test_gradients_pass_the_numerical_check() -> None:
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, x)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))


def test_a_row_of_zeros_stays_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6), torch.zeros(2, 4))


def test_bfloat16_is_normalized_in_float32() -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    exact = plain_rms_norm(x.double(), torch.ones(96, dtype=torch.float64), 1e-6).bfloat16()
    found = rms_norm(x, torch.ones(96, dtype=torch.bfloat16), 1e-6)
    assert (found != exact).float().mean() < 0.01, "rounded once, at the end"
