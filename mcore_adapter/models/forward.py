"""Runs packed microbatches through Megatron's pipeline schedules, from token ids to what a loss sees.

Log-probabilities and entropies are fused with the LM head, vocabulary-parallel and in chunks of tokens. The full
[tokens, vocabulary] logits never exist: the forward pass keeps two numbers a token, the backward pass recomputes the
logits chunk by chunk. Only when all tokens fit in one chunk are its probabilities kept instead. Invariants: the LM head
and the value head are evaluated at trained tokens only (loss_mask); every other entry of a `ModelOutput` is 0. At most
a few [chunk_tokens, vocabulary shard] buffers are allocated at any time, whatever the number of tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_adapter.autograd import Context
from mcore_adapter.data.batch import ModelOutput
from mcore_adapter.data.packing import PackedMicrobatch
from mcore_adapter.settings import chunks

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


def lm_output(
    hidden: Tensor,  # [1, s, h], or [1, s / tp, h] with sequence parallelism
    weight: Tensor,  # [v / tp, h]
    microbatch: PackedMicrobatch,
    *,
    tp_group: torch.distributed.ProcessGroup,
    sequence_parallel: bool,
    temperature: float,
    with_entropy: bool,
) -> ModelOutput:
    """Compute log-probabilities and entropies of the trained tokens."""
    flat = hidden.squeeze(0)
    if sequence_parallel:
        flat = gather_from_sequence_parallel_region(flat, tensor_parallel_output_grad=True, group=tp_group)
    elif tp_group.size() > 1:
        flat = copy_to_tensor_model_parallel_region(flat, group=tp_group)
    logprobs, entropy = linear_logprobs(
        flat.index_select(0, microbatch.rows),
        weight,
        microbatch.targets,
        temperature=temperature,
        tp_group=tp_group,
        with_entropy=with_entropy,
    )
    return ModelOutput(
        logprobs=_spread(logprobs, microbatch), entropy=None if entropy is None else _spread(entropy, microbatch)
    )


def value_output(values: Tensor, microbatch: PackedMicrobatch) -> ModelOutput:
    """Select the values of the trained tokens from those of every packed position, [1, s, 1]."""
    return ModelOutput(values=_spread(values.reshape(-1).float().index_select(0, microbatch.rows), microbatch))


def _spread(trained: Tensor, microbatch: PackedMicrobatch) -> Tensor:
    """Scatter [n] to [t], 0 elsewhere."""
    num_tokens = microbatch.fields["loss_mask"].numel()
    return trained.new_zeros(num_tokens).index_copy(0, microbatch.trained, trained)


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[PackedMicrobatch],
    postprocess: Callable[[PackedMicrobatch, Tensor], object],
    *,
    forward_only: bool,
) -> list[Any]:
    """Run forward (and backward) over all microbatches, with the pipeline schedule of the layout. Collective.

    `postprocess(microbatch, model output)` runs on the last stage. Forward only, it returns anything; else the triple
    (loss, token count, anything) of Megatron's per-token losses. Returns the anythings, in order; [] on other stages.
    """

    def forward_step(
        iterator: Iterator[PackedMicrobatch], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., object]]:
        microbatch = next(iterator)
        output = model(
            microbatch.token_ids, microbatch.position_ids, None, packed_seq_params=microbatch.packed_seq_params
        )
        return output, partial(_ignore_non_loss, partial(postprocess, microbatch))

    iterators = [iter(microbatches) for _ in chunks]
    single = len(chunks) == 1
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators[0] if single else iterators,
        model=chunks[0] if single else list(chunks),
        num_microbatches=len(microbatches),
        seq_length=max(m.token_ids.shape[1] for m in microbatches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _ignore_non_loss(function: Callable[[Tensor], object], output: Tensor, non_loss_data: bool = False) -> object:
    """Accept the argument non_loss_data=True, which Megatron passes where it collects results instead of losses."""
    return function(output)
