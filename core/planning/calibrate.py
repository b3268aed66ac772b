"""Measure the rates of this host for the planner: `slipstream plan --calibrate`.

Kernels that an update and a server consist of, one at a time, on the first GPU, or on the CPU where there is none. What
needs a server is not measured: those rows keep the values of H200, which `source` notes.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.planning.rates import Calibration, calibration_of
from core.planning.scene import gpu_of_machine

_ROUNDS = 3
_WIDTHS = ((1536, 17920), (3584, 37888))  # hidden size and both halves of an MLP, of 1.5B and 7B
_HEADS = 12


def calibrate() -> Calibration:
    """Measure this host, which takes one to three minutes."""
    found = torch.accelerator.current_accelerator()
    on_gpu, gpu = found is not None, None if found is None else gpu_of_machine()
    device = torch.device("cpu") if found is None else torch.device(found.type, 0)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    tokens = 16384 if on_gpu else 128
    lengths = (1024, 16384) if on_gpu else (256, 1024)
    forward, backward = zip(*(_attention(device, dtype, length, on_gpu) for length in lengths), strict=True)
    half = _half_length(lengths, forward)
    reached = lengths[-1] / (lengths[-1] + half)
    reference = calibration_of("H200")
    assert reference is not None, "it is part of this package"
    products = statistics.harmonic_mean([_products(device, dtype, tokens, *widths) for widths in _WIDTHS])
    return Calibration(
        gpu=f"CPU of {os.cpu_count()} cores" if gpu is None else gpu.name,
        source="slipstream plan --calibrate; decode_*_seconds and layer_launch_seconds are those of H200",
        gib=0.0 if gpu is None else gpu.gib,
        products=products,
        expert_products=_experts(device, dtype, tokens),
        attention_forward=forward[-1] / reached,
        attention_backward=backward[-1] / reached,
        attention_half_length=half,
        attention_narrow=_attention(device, dtype, lengths[-1], on_gpu, head_dim=64)[0] / forward[-1],
        layer_launch_seconds=reference.layer_launch_seconds,
        memory=_memory(device, 1 << 28 if on_gpu else 1 << 24),
        link=_link(device) if on_gpu and torch.accelerator.device_count() > 1 else reference.link,
        decode_step_seconds=reference.decode_step_seconds,
        decode_layer_link_seconds=reference.decode_layer_link_seconds,
    )


def _seconds(device: torch.device, step: Callable[[], object]) -> float:
    """Return the median of some rounds after a first one."""

    def once() -> float:
        start = time.perf_counter()
        step()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - start

    return statistics.median([once() for _ in range(_ROUNDS + 1)][1:])


def _products(device: torch.device, dtype: torch.dtype, tokens: int, hidden: int, width: int) -> float:
    """Return operations per second of a linear layer and of its two gradients."""
    x, w, grad = (torch.randn(*size, device=device, dtype=dtype) for size in _shapes(tokens, hidden, width))

    def step() -> None:
        torch.mm(x, w.t())
        torch.mm(grad, w)
        torch.mm(grad.t(), x)

    return 6.0 * tokens * hidden * width / _seconds(device, step)


def _shapes(tokens: int, hidden: int, width: int) -> tuple[tuple[int, int], ...]:
    return (tokens, hidden), (width, hidden), (tokens, width)


def _experts(device: torch.device, dtype: torch.dtype, tokens: int) -> float:
    """Return the same of 16 experts with the widths of Qwen3-30B-A3B, as one batched product."""
    experts, hidden, width = 16, 2048, 1536
    rows = max(1, tokens // experts)
    x = torch.randn(experts, rows, hidden, device=device, dtype=dtype)
    w = torch.randn(experts, hidden, width, device=device, dtype=dtype)
    return 2.0 * experts * rows * hidden * width / _seconds(device, lambda: torch.bmm(x, w))


def _attention(
    device: torch.device, dtype: torch.dtype, length: int, on_gpu: bool, *, head_dim: int = 128
) -> tuple[float, float]:
    """Return operations per second of causal attention, forward and backward, counted as the planner counts them."""
    count = max(1, 16384 // length) if on_gpu else 1
    shape = (count, _HEADS, length, head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, device=device, dtype=dtype)
    operations = 2.0 * count * _HEADS * head_dim * length * length

    def run() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with _fastest_attention():
        forward = _seconds(device, run)
        both = _seconds(device, lambda: torch.autograd.grad(run(), (q, k, v), grad))
    return operations / forward, 2.5 * operations / max(both - forward, 1e-9)


def _fastest_attention() -> Any:
    """Prefer cuDNN's kernel, which TransformerEngine calls too."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def _half_length(lengths: tuple[int, ...], rates: tuple[float, ...]) -> float:
    """Return h of rate(l) = most * l / (l + h) through two points; 0 where short sequences are as fast."""
    (short, long), (slow, fast) = lengths, rates
    ratio = slow / fast  # short (long + h) / (long (short + h))
    denominator = short - ratio * long
    if ratio >= 1 or denominator >= 0:
        return 0.0
    return short * long * (ratio - 1) / denominator


def _memory(device: torch.device, elements: int) -> float:
    """Return bytes per second of a copy, those that are read and those that are written."""
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    return 8.0 * elements / _seconds(device, lambda: target.copy_(source))


def _link(device: torch.device) -> float:
    """Return bytes per second from the first GPU to the second."""
    source = torch.empty(1 << 28, device=device)
    target = torch.empty_like(source, device=torch.device(device.type, 1))
    return 4.0 * len(source) / _seconds(device, lambda: target.copy_(source))
