"""Kernels of experts on GPUs: routing of tokens, and what lies between the grouped products.

models/router.py and models/experts.py define what they compute. Each reads and writes every element once, and computes
in float32. PARTIAL: some copies are absent, their row is -1. A program of the routing computes some rows of the logits
in one warp: reductions never leave it. A tile of experts has GROUPS_BLOCK times GROUP_BLOCK columns, powers of two, so
that groups of any size are rows of a reshaped tile; columns that stand for no expert score -inf. Invariants: no
kernel's launch depends on how many rows an expert has; from forward to backward, routing keeps the logits and the
numbers of the chosen experts, nothing else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_adapter.autograd import Context
from model_specs.config import MoEConfig

_TILE = 512  # elements of a program: 16 a thread


@triton.jit
def _score(logits, peak, mass, SOFTMAX: tl.constexpr):
    """Compute softmax from a row's maximum and its sum of exponentials, or sigmoid."""
    return tl.exp(logits - peak) / mass if SOFTMAX else tl.sigmoid(logits)


@triton.jit
def _without_other_groups(
    keys, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    ROWS: tl.constexpr, GROUPS_BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace keys [ROWS, columns] outside of each row's TOP_GROUPS best groups by -inf."""
    grouped = tl.reshape(keys, (ROWS, GROUPS_BLOCK, GROUP_BLOCK))
    best = tl.max(grouped, 2)
    if TOP2:
        first = tl.argmax(grouped, 2)
        is_first = tl.arange(0, GROUP_BLOCK)[None, None, :] == first[:, :, None]
        best += tl.max(tl.where(is_first, -float("inf"), grouped), 2)
    groups = tl.arange(0, GROUPS_BLOCK)[None, :]
    kept = tl.zeros((ROWS, GROUPS_BLOCK), tl.int1)
    for _ in range(TOP_GROUPS):
        is_next = groups == tl.argmax(best, 1)[:, None]
        kept = kept | is_next
        best = tl.where(is_next, -float("inf"), best)
    return tl.reshape(tl.where(kept[:, :, None], grouped, -float("inf")), (ROWS, GROUPS_BLOCK * GROUP_BLOCK))


@triton.jit
def _routing_kernel(
    logits, bias, forced, weights, experts, num_tokens, forced_row, forced_slot, scaling,
    NUM_EXPERTS: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, TOP2: tl.constexpr, BIASED: tl.constexpr, FORCED: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, GROUPS_BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    live = row < num_tokens
    columns = tl.arange(0, GROUPS_BLOCK * GROUP_BLOCK)[None, :]
    numbers = columns // GROUP_BLOCK * GROUP + columns % GROUP_BLOCK
    exists = (columns % GROUP_BLOCK < GROUP) & (numbers < NUM_EXPERTS)
    values = tl.load(logits + row * NUM_EXPERTS + numbers, mask=live & exists, other=-float("inf"))
    peak = tl.max(values, 1)[:, None]
    mass = tl.sum(tl.exp(values - peak), 1)[:, None]

    keys = _score(values, peak, mass, SOFTMAX)
    if BIASED:
        keys += tl.load(bias + numbers, mask=exists, other=0.0)
    keys = tl.where(keys == keys, keys, float("inf"))  # NaN
    keys = tl.where(exists, keys, -float("inf"))
    if TOP_GROUPS < GROUPS_BLOCK:
        keys = _without_other_groups(keys, TOP_GROUPS, TOP2, ROWS, GROUPS_BLOCK, GROUP_BLOCK)
    slots = tl.arange(0, SLOTS)[None, :]
    chosen = tl.zeros((ROWS, SLOTS), tl.int32)
    for slot in range(K):
        column = tl.argmax(keys, 1)[:, None]
        keys = tl.where(columns == column, -float("inf"), keys)
        chosen = tl.where(slots == slot, column // GROUP_BLOCK * GROUP + column % GROUP_BLOCK, chosen)

    filled = live & (slots < K)
    if FORCED:
        given = tl.load(forced + row * forced_row + slots * forced_slot, mask=filled, other=0).to(tl.int32)
        chosen = tl.where(tl.min(given, 1)[:, None] >= 0, given, chosen)
    taken = tl.load(logits + row * NUM_EXPERTS + chosen, mask=filled, other=-float("inf"))
    scores = _score(taken, peak, mass, SOFTMAX)  # of an empty slot: 0
    if NORMALIZE:
        scores = scores / (tl.sum(scores, 1)[:, None] + 1e-20)
    tl.store(weights + row * K + slots, scores * scaling, mask=filled)
    tl.store(experts + row * K + slots, chosen.to(tl.int64), mask=filled)


@triton.jit
def _routing_grad_kernel(
    logits, experts, grad_weights, grad_logits, num_tokens, scaling,
    NUM_EXPERTS: tl.constexpr, K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    live = row < num_tokens
    numbers = tl.arange(0, BLOCK)[None, :]
    inside = live & (numbers < NUM_EXPERTS)
    values = tl.load(logits + row * NUM_EXPERTS + numbers, mask=inside, other=-float("inf"))
    peak = tl.max(values, 1)[:, None]
    scores = _score(values, peak, tl.sum(tl.exp(values - peak), 1)[:, None], SOFTMAX)

    grad = tl.zeros((ROWS, BLOCK), tl.float32)  # of the scores
    times = tl.zeros((ROWS, BLOCK), tl.float32)  # that an expert was chosen
    for slot in tl.static_range(K):
        expert = tl.load(experts + row * K + slot, mask=live, other=-1)
        by_weight = tl.load(grad_weights + row * K + slot, mask=live, other=0.0)
        grad += tl.where(numbers == expert, by_weight, 0.0)
        times += tl.where(numbers == expert, 1.0, 0.0)
    if NORMALIZE:
        total = tl.sum(times * scores, 1)[:, None] + 1e-20
        grad = (grad - times * (tl.sum(grad * scores, 1)[:, None] / total)) / total
    grad *= scaling
    grad = scores * (grad - tl.sum(grad * scores, 1)[:, None]) if SOFTMAX else grad * scores * (1.0 - scores)
    tl.store(grad_logits + row * NUM_EXPERTS + numbers, grad, mask=inside)


class _Routing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, logits: Tensor, moe: MoEConfig, bias: Tensor | None, forced: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        t = len(logits)
        logits = logits.contiguous()
        weights = logits.new_empty((t, moe.top_k))
        experts = logits.new_empty((t, moe.top_k), dtype=torch.int64)
        num_groups = moe.num_groups if moe.top_k_groups < moe.num_groups else 1
        group = moe.num_experts // num_groups
        groups_block, group_block = triton.next_power_of_2(num_groups), triton.next_power_of_2(group)
        rows = max(1, _TILE // (groups_block * group_block))
        forced_row, forced_slot = (0, 0) if forced is None else forced.stride()
        if t:
            _routing_kernel[(triton.cdiv(t, rows),)](
                logits, logits if bias is None else bias, experts if forced is None else forced, weights, experts,
                t, forced_row, forced_slot, moe.scaling,
                NUM_EXPERTS=moe.num_experts, K=moe.top_k, GROUP=group, TOP_GROUPS=min(moe.top_k_groups, num_groups),
                TOP2=moe.group_score == "top2", BIASED=bias is not None, FORCED=forced is not None,
                ROWS=rows, SLOTS=triton.next_power_of_2(moe.top_k), GROUPS_BLOCK=groups_block, GROUP_BLOCK=group_block,
                **_common(moe),
            )  # fmt: skip
        ctx.save_for_backward(logits, experts)
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)  # of the experts
        ctx.moe = moe
        return weights, experts

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor, _: None) -> tuple[Tensor, None, None, None]:
        (logits, experts), moe = ctx.saved_tensors, ctx.moe
        t, grad_logits = len(logits), torch.empty_like(logits)
        block = triton.next_power_of_2(moe.num_experts)
        rows = max(1, _TILE // block)
        if t:
            _routing_grad_kernel[(triton.cdiv(t, rows),)](
                logits, experts, grad.contiguous(), grad_logits, t, moe.scaling,
                NUM_EXPERTS=moe.num_experts, K=moe.top_k, ROWS=rows, BLOCK=block, **_common(moe),
            )  # fmt: skip
        return grad_logits, None, None, None


def fused_routing(
    logits: Tensor, moe: MoEConfig, *, bias: Tensor | None = None, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See Routing in models/router.py; logits and weights are float32."""
    assert logits.dtype == torch.float32, logits.dtype
    weights, experts = _Routing.apply(logits, moe, bias, forced)
    return weights, experts


def _common(moe: MoEConfig) -> dict[str, object]:
    """Return what both kernels are compiled for."""
    return {"SOFTMAX": moe.score_function == "softmax", "NORMALIZE": moe.normalize, "num_warps": 1}


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
