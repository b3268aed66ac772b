"""The LM head on GPUs: what models/forward.py computes with passes over fp32 logits, in one pass over the bf16 ones.

The matrix products are cuBLAS's. Between them a Triton kernel reads logits once (forward: log-sum-exp, target logit,
entropy) or turns them into their own gradient in place (backward), everything summed in fp32. In the forward pass
logits are fp32 too: bfloat16 would round a logit of 20 by up to 0.06. Invariant: at most one [chunk_tokens, vocabulary
shard] buffer in the model's format is allocated, and FP32_ROWS rows in fp32; where all tokens fit in one chunk the
buffer is kept from forward to backward, which then recomputes nothing. Otherwise the chunks are smaller.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_adapter.autograd import Context
from mcore_adapter.settings import FP32_ROWS, LOGITS_BYTES, SEVERAL_LOGITS_BYTES, chunks

_BLOCK = 4096


@triton.jit
def _stats_kernel(
    logits, kept, targets, out, num_rows, stride, kept_stride, inv_temperature,
    NUM_COLS: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write log-sum-exp, target logit and entropy of each row of logits [rows, cols] * inv_temperature to out [3,
    rows]. A target outside [0, cols) gives the logit 0. With KEEP the logits are copied into kept [rows, cols]."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    top = -float("inf")
    norm = 0.0
    weighted = 0.0
    for start in range(0, NUM_COLS, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        raw = tl.load(base + cols, mask=cols < NUM_COLS, other=-float("inf"))
        if KEEP:
            tl.store(kept + row * kept_stride + cols, raw.to(kept.dtype.element_ty), mask=cols < NUM_COLS)
        x = raw.to(tl.float32) * inv_temperature
        new_top = tl.maximum(top, tl.max(x, 0))
        shrink = tl.exp(top - new_top)
        p = tl.exp(x - new_top)
        # Relative to the top both terms of the entropy are positive: nothing cancels.
        below = tl.where(cols < NUM_COLS, p * (new_top - x), 0.0)
        shifted = tl.where(norm > 0, weighted + norm * (new_top - top), 0.0)
        weighted = shifted * shrink + tl.sum(below, 0)
        norm = norm * shrink + tl.sum(p, 0)
        top = new_top
    target = tl.load(targets + row)
    owned = (target >= 0) & (target < NUM_COLS)
    chosen = tl.load(base + target, mask=owned, other=0.0).to(tl.float32) * inv_temperature
    log_norm = tl.log(norm)
    tl.store(out + row, top + log_norm)
    tl.store(out + num_rows + row, chosen)
    tl.store(out + 2 * num_rows + row, log_norm + weighted / norm)


@triton.jit
def _grad_kernel(
    logits, targets, log_norm, entropy, grad_logprobs, grad_entropy, stride, inv_temperature,
    NUM_COLS: tl.constexpr, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace logits [rows, cols] by the gradient of the loss with respect to them."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    target = tl.load(targets + row)
    norm = tl.load(log_norm + row)
    by_logprob = tl.load(grad_logprobs + row) * inv_temperature
    if WITH_ENTROPY:
        by_entropy = tl.load(grad_entropy + row) * inv_temperature
        mean = tl.load(entropy + row)
    for start in range(0, NUM_COLS, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < NUM_COLS
        x = tl.load(base + cols, mask=inside, other=-float("inf")).to(tl.float32) * inv_temperature
        logp = x - norm
        p = tl.exp(logp)
        grad = tl.where(cols == target, by_logprob, 0.0) - by_logprob * p
        if WITH_ENTROPY:
            grad -= by_entropy * tl.where(inside, p * (logp + mean), 0.0)
        tl.store(base + cols, grad.to(logits.dtype.element_ty), mask=inside)


class FusedLogprobs(torch.autograd.Function):
    """(logprobs [t], entropy [t]) fp32 of hidden [t, h] under this rank's rows [v / tp, h] of the head. `combine` joins
    the shards' statistics [3, t] and returns (log-sum-exp, target logit, entropy) of the whole vocabulary."""

    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        tp_group: dist.ProcessGroup | None,
        combine: Callable[..., tuple[Tensor, Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        shard = weight.shape[0]
        first = 0 if tp_group is None else tp_group.rank() * shard
        local = targets - first
        stats = hidden.new_zeros((3, hidden.shape[0]), dtype=torch.float32)
        needed = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        kept = None
        if needed and hidden.shape[0] <= chunk_tokens:
            kept = hidden.new_empty((hidden.shape[0], shard))
        for rows in chunks(hidden.shape[0], min(chunk_tokens, FP32_ROWS)):
            logits = _add_product(None, hidden[rows], weight.t(), torch.float32)
            if not len(logits):
                continue
            part = stats[:, rows].contiguous()
            copy = logits if kept is None else kept[rows]
            _stats_kernel[(len(logits),)](
                logits, copy, local[rows], part, len(logits), logits.stride(0), copy.stride(0), 1.0 / temperature,
                NUM_COLS=shard, KEEP=kept is not None, BLOCK=_BLOCK, num_warps=8,
            )  # fmt: skip
            stats[:, rows] = part
            del logits, copy  # before the next rows have theirs
        log_norm, target_logits, entropy = combine(stats, tp_group)
        ctx.save_for_backward(hidden, weight, local, log_norm, entropy)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.logits = kept
        ctx.set_materialize_grads(False)
        return target_logits - log_norm, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, local, log_norm, entropy = ctx.saved_tensors
        kept, ctx.logits = ctx.logits, None  # overwritten below: a second backward must recompute
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_norm)
        grad_logprobs = grad_logprobs.contiguous()
        by_entropy = grad_logprobs if grad_entropy is None else grad_entropy.contiguous()
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = None
        size = ctx.chunk_tokens if kept is not None else max(1, ctx.chunk_tokens * SEVERAL_LOGITS_BYTES // LOGITS_BYTES)
        # The products of several chunks are added in float32, by the products themselves.
        several = torch.float32 if hidden.shape[0] > size else weight.dtype
        for rows in chunks(hidden.shape[0], size):
            grad = torch.mm(hidden[rows], weight.t()) if kept is None else kept
            if len(grad):
                _grad_kernel[(len(grad),)](
                    grad, local[rows], log_norm[rows], entropy[rows], grad_logprobs[rows], by_entropy[rows],
                    grad.stride(0), 1.0 / ctx.temperature,
                    NUM_COLS=weight.shape[0], WITH_ENTROPY=grad_entropy is not None, BLOCK=_BLOCK, num_warps=8,
                )  # fmt: skip
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if ctx.needs_input_grad[1]:
                grad_weight = _add_product(grad_weight, grad.t(), hidden[rows], several)
            kept = grad = None  # before the next chunk has logits
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b in this format, the one of a and b or a wider one, added to `total` in place where there is one."""
    if total is None:
        return torch.mm(a, b) if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)
    if a.dtype == dtype:
        return torch.addmm(total, a, b, out=total)
    return torch.addmm(total, a, b, out_dtype=dtype, out=total)


def chunk_tokens_for(weight: Tensor) -> int:
    """Return the number of tokens whose logits fit in the buffer."""
    return max(1, LOGITS_BYTES // (weight.shape[0] * weight.element_size()))
