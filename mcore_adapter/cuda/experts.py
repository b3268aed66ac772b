"""Kernels between the grouped products of experts on GPUs; models/experts/products.py defines what they compute.

Each reads and writes every element once, and computes in float32. PARTIAL: some copies are absent, their row is -1.
Invariant: no kernel's launch depends on how many rows an expert has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _spread_kernel(
    x, of_copy, out, WIDTH: tl.constexpr, K: tl.constexpr, PARTIAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy each row of x [t, WIDTH] to K rows of `out`."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    values = tl.load(x + token * WIDTH + cols, mask=inside)
    for copy in tl.static_range(K):
        row = tl.load(of_copy + token * K + copy).to(tl.int64)
        if PARTIAL:
            tl.store(out + row * WIDTH + cols, values, mask=inside & (row >= 0))
        else:
            tl.store(out + row * WIDTH + cols, values, mask=inside)


@triton.jit
def _collect_kernel(
    y, of_copy, out, WIDTH: tl.constexpr, K: tl.constexpr, PARTIAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum K rows of y into each row of out [t, WIDTH]."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for copy in tl.static_range(K):
        row = tl.load(of_copy + token * K + copy).to(tl.int64)
        if PARTIAL:
            total += tl.load(y + row * WIDTH + cols, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        else:
            total += tl.load(y + row * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + cols, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_kernel(halves, weights, copies, out, WIDTH: tl.constexpr, COPIED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    gate = tl.load(halves + row * 2 * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(halves + row * 2 * WIDTH + WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    place = row
    if COPIED:
        place = tl.load(copies + row)
    weight = tl.load(weights + place).to(tl.float32)
    tl.store(out + row * WIDTH + cols, (gate * tl.sigmoid(gate) * up * weight).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_grad_kernel(
    halves, weights, copies, grad, grad_halves, grad_weights,
    WIDTH: tl.constexpr, COPIED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace grad [r, WIDTH] by the value of _swiglu_kernel."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    gate = tl.load(halves + row * 2 * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(halves + row * 2 * WIDTH + WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    by_value = tl.load(grad + row * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    place = row
    if COPIED:
        place = tl.load(copies + row)
    weight = tl.load(weights + place).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    by_product = by_value * weight
    by_gate = by_product * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(grad_halves + row * 2 * WIDTH + cols, by_gate.to(grad_halves.dtype.element_ty), mask=inside)
    by_up = by_product * silu
    tl.store(grad_halves + row * 2 * WIDTH + WIDTH + cols, by_up.to(grad_halves.dtype.element_ty), mask=inside)
    tl.store(grad_weights + place, tl.sum(by_value * silu * up, 0).to(grad_weights.dtype.element_ty))
    tl.store(grad + row * WIDTH + cols, (silu * up * weight).to(grad.dtype.element_ty), mask=inside)


def spread(x: Tensor, of_copy: Tensor, num_rows: int) -> Tensor:
    t, k = of_copy.shape
    x = x.contiguous()
    out = x.new_empty((num_rows, x.shape[1]))
    if num_rows:
        _spread_kernel[(t,)](x, of_copy, out, WIDTH=x.shape[1], K=k, PARTIAL=num_rows < t * k, **_shape(x.shape[1]))
    return out


def collect(y: Tensor, of_copy: Tensor) -> Tensor:
    t, k = of_copy.shape
    if not len(y):
        return y.new_zeros((t, y.shape[1]))
    out = y.new_empty((t, y.shape[1]))
    _collect_kernel[(t,)](y, of_copy, out, WIDTH=y.shape[1], K=k, PARTIAL=len(y) < t * k, **_shape(y.shape[1]))
    return out


def weighted_swiglu(halves: Tensor, weights: Tensor, copies: Tensor | None) -> Tensor:
    r, width = halves.shape[0], halves.shape[1] // 2
    out = halves.new_empty((r, width))
    if r:
        places = weights if copies is None else copies
        _swiglu_kernel[(r,)](
            halves, weights.contiguous(), places, out, WIDTH=width, COPIED=copies is not None, **_shape(width)
        )
    return out


def weighted_swiglu_backward(
    halves: Tensor, weights: Tensor, grad: Tensor, copies: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    r, width = grad.shape
    new = torch.empty if r == weights.numel() else torch.zeros  # absent copies have no row that writes theirs
    grad_halves, grad_weights = (
        torch.empty_like(halves),
        new(weights.shape, dtype=weights.dtype, device=weights.device),
    )
    if r:
        places = weights if copies is None else copies
        _swiglu_grad_kernel[(r,)](
            halves, weights.contiguous(), places, grad, grad_halves, grad_weights,
            WIDTH=width, COPIED=copies is not None, **_shape(width),
        )  # fmt: skip
    return grad, grad_halves, grad_weights


def _shape(width: int) -> dict[str, int]:
    """Return a program's block for one row, and its warps: 8 to 16 elements a thread."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}
