"""Log-probabilities and entropies fused with the LM head, vocabulary-parallel and in chunks of tokens.

The full [tokens, vocabulary] logits never exist: the forward pass keeps two numbers a token, the backward pass
recomputes the logits chunk by chunk. Only when all tokens fit in one chunk are its probabilities kept instead.
Invariant: at most a few [chunk_tokens, vocabulary shard] buffers are allocated at any time, whatever the number of
tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_adapter.autograd import Context
from mcore_adapter.data.token_chunks import chunks

LOGITS_PER_CHUNK = 1 << 28
"""Default size of a chunk, in logits of this rank's vocabulary shard: 1 GiB of fp32. The gradient of the weight is read
and written once a chunk, so small chunks of a large vocabulary would spend their time on that."""


def linear_logprobs(
    hidden: Tensor,  # [t, h]
    weight: Tensor,  # [v / tp, h], this rank's rows of the LM head
    targets: Tensor,  # [t] int64, global token ids
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute log softmax(hidden @ weight.T / temperature)[targets] and, if requested, the entropy of that
    distribution.

    Returns ([t] float32, [t] float32 or None), equal on all ranks of `tp_group`. The gradient of `weight` is that of
    the shard; the gradient of `hidden` is this rank's share only: whatever brought `hidden` to all ranks of the group
    (copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region) sums the shares in its own backward.
    `chunk_tokens` bounds memory; the default is LOGITS_PER_CHUNK logits.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be above 0: greedy decoding has no log-probabilities")
    if weight.is_cuda and hidden.dtype == weight.dtype:
        from mcore_adapter.cuda.lm_head import FusedLogprobs, chunk_tokens_for

        logprobs, entropy = FusedLogprobs.apply(
            hidden, weight, targets, temperature, chunk_tokens or chunk_tokens_for(weight), tp_group, _combine
        )
        return logprobs, entropy if with_entropy else None
    if chunk_tokens is None:
        chunk_tokens = max(1, LOGITS_PER_CHUNK // weight.shape[0])
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    keep_probs = needs_grad and hidden.shape[0] <= chunk_tokens
    logprobs, entropy = _LinearLogprobs.apply(
        hidden, weight, targets, temperature, chunk_tokens, tp_group, with_entropy, keep_probs
    )
    return logprobs, entropy if with_entropy else None


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        tp_group: dist.ProcessGroup | None,
        with_entropy: bool,
        keep_probs: bool,
    ) -> tuple[Tensor, Tensor]:
        local_targets, owned = _localise(targets, weight.shape[0], tp_group)
        # One row each: log-sum-exp of this shard, its target logit (0 where another shard owns it), its entropy.
        stats = hidden.new_zeros((3 if with_entropy else 2, hidden.shape[0]), dtype=torch.float32)
        probs = None
        for rows in chunks(hidden.shape[0], chunk_tokens):
            logits = _logits(hidden[rows], weight, temperature)
            probs = logits.softmax(-1)
            top = logits.amax(-1)
            # exact to rounding: the largest probability is at least 1 / vocabulary, so its log cannot underflow
            norm_above_top = probs.amax(-1).log_().neg_()
            stats[0, rows] = top + norm_above_top
            stats[1, rows] = logits.gather(1, local_targets[rows, None]).squeeze(1)
            if with_entropy:  # relative to the top logit both terms are positive: nothing cancels
                mean_below_top = torch.bmm(probs[:, None], logits.sub_(top[:, None])[:, :, None])[:, 0, 0]
                stats[2, rows] = norm_above_top - mean_below_top
        if owned is not None:
            stats[1].mul_(owned)
        log_norm, target_logits, entropy = _combine(stats, tp_group)
        logprobs = target_logits - log_norm
        if entropy is None:
            entropy = logprobs.new_empty(0)

        ctx.save_for_backward(hidden, weight, local_targets, owned, stats[0], log_norm, entropy)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.probs = probs if keep_probs else None
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, local_targets, owned, shard_norm, log_norm, entropy = ctx.saved_tensors
        probs, ctx.probs = ctx.probs, None  # overwritten below: a second backward must recompute
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_norm)
        scale = (shard_norm - log_norm).exp_().div_(ctx.temperature)  # shard's probabilities -> global ones, over T
        target_grad = grad_logprobs / ctx.temperature
        if owned is not None:
            target_grad = target_grad * owned
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = None
        for rows in chunks(hidden.shape[0], ctx.chunk_tokens):
            if probs is None or grad_entropy is not None:
                logits = _logits(hidden[rows], weight, ctx.temperature)
                probs = logits.softmax(-1)
            if grad_entropy is None:
                grad = probs.mul_((-grad_logprobs[rows] * scale[rows])[:, None])
            else:
                # d entropy / d logit = -p (log p + entropy)
                grad = logits.sub_((log_norm[rows] - entropy[rows])[:, None]).mul_(-grad_entropy[rows, None])
                grad = grad.sub_(grad_logprobs[rows, None]).mul_(scale[rows, None]).mul_(probs)
            grad.scatter_add_(1, local_targets[rows, None], target_grad[rows, None])
            probs = None
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if ctx.needs_input_grad[1]:
                grad_weight = _accumulate(grad_weight, grad, hidden[rows])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Compute logits in a buffer of their own: [c, v / tp] float32."""
    logits = torch.mm(hidden, weight.t()).float()
    return logits.div_(temperature) if temperature != 1.0 else logits


def _accumulate(total: Tensor | None, grad: Tensor, hidden: Tensor) -> Tensor:
    """Return total + grad.T @ hidden, summed in float32: [v / tp, h]."""
    if total is None:
        return torch.mm(grad.t(), hidden).float()
    if hidden.dtype == torch.float32:
        return total.addmm_(grad.t(), hidden)
    return total.add_(torch.mm(grad.t(), hidden))


def _localise(targets: Tensor, shard: int, tp_group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor | None]:
    """Convert global ids to (row in this shard, 0 for others' targets; float mask of the owned ones, None when all
    are)."""
    if tp_group is None or tp_group.size() == 1:
        return targets, None
    local = targets - tp_group.rank() * shard
    owned = (local >= 0) & (local < shard)
    return local.where(owned, 0), owned.float()


def _combine(stats: Tensor, tp_group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Combine the shards' statistics to those of the whole vocabulary: log-sum-exp, target logit, entropy ([t] each).

    One all-gather; every rank then sums in the same order, so the results are bit-equal across the group.
    """
    with_entropy = len(stats) == 3
    if tp_group is None or tp_group.size() == 1:
        return stats[0], stats[1], stats[2] if with_entropy else None
    gathered = stats.new_empty((tp_group.size(), *stats.shape))
    dist.all_gather_into_tensor(gathered.view(-1), stats.view(-1), group=tp_group)
    shard_norms = gathered[:, 0]
    log_norm = shard_norms.logsumexp(0)
    entropy = None
    if with_entropy:
        log_share = shard_norms - log_norm  # of each shard in the total probability
        entropy = (log_share.exp() * (gathered[:, 2] - log_share)).sum(0)
    return log_norm, gathered[:, 1].sum(0), entropy
