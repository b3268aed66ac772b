"""Sums over the tokens of a minibatch: what a loss is the mean of, and sums of each sequence.

Every rank computes token weights from the whole minibatch, in float64: their sums depend neither on the layout nor on
the cut into microbatches. Context parallelism spreads the tokens of a sequence over several ranks: `Sequences.sum`
returns the same on every rank of such a group, and its gradient reaches the tokens on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_adapter.autograd import Context
from mcore_adapter.data.batch import PackedBatch, sequence_of_token

TOKEN_WEIGHTS = "token_weights"
"""The field [T] float32 in which a loss finds the weights of its tokens."""
ROLLOUTS = "rollouts"
"""The field [T] int64 with the rollout of each token, where rollouts have several sequences."""
TokenWeights = Callable[[PackedBatch], Tensor]
"""minibatch -> weight of each of its tokens [T]."""


def token_mean(minibatch: PackedBatch) -> Tensor:
    """Weigh every trained token alike: [T] float64, 0 outside loss_mask."""
    return minibatch.loss_mask.double()


def sequence_mean(minibatch: PackedBatch) -> Tensor:
    """Weigh every sequence alike, and so every trained token of its L: 1 / L, [T] float64. The branches of a rollout
    are one sequence.

    Sequences without trained tokens have no weight, so that the sum is the number of those that have some."""
    mask = minibatch.loss_mask
    sequence = sequence_of_token(minibatch.seq_lens)
    if ROLLOUTS in minibatch.fields:
        sequence = minibatch.fields[ROLLOUTS].unique(return_inverse=True)[1]
    trained = torch.zeros(minibatch.num_sequences, dtype=torch.float64).index_add(0, sequence, mask.double())
    return torch.where(mask, 1.0 / trained[sequence].clamp(min=1), 0.0)


def token_sum(minibatch: PackedBatch, *, divisor: float) -> Tensor:
    """Weigh every trained token by 1, with a sum of `divisor` whatever their number: [T] float64.

    The first token is never trained; it holds the difference, and no loss has a term for it. Source: Liu et al. 2025
    ("Understanding R1-Zero-like training"), which divides by a constant."""
    weights = minibatch.loss_mask.double()
    weights[0] = divisor - weights.sum()
    return weights


@dataclass(frozen=True)
class Divisors:
    """Sums of the weights of a minibatch."""

    loss: float
    """Of all tokens."""
    metrics: float
    """Of the trained tokens."""


def weigh_tokens(minibatch: PackedBatch, token_weights: TokenWeights) -> tuple[PackedBatch, Divisors]:
    """Return the minibatch with the field TOKEN_WEIGHTS, and the sums of the weights; 1 where a sum is 0.

    Raises ValueError where the weights are not one finite number a token, or their sum is negative."""
    weights = token_weights(minibatch).detach().double()
    if weights.shape != minibatch.loss_mask.shape:
        raise ValueError(f"token_weights: shape {tuple(weights.shape)}, expected [T] = [{minibatch.num_tokens}]")
    total = float(weights.sum())
    trained = float(weights[minibatch.loss_mask].sum())
    if not 0.0 <= total < float("inf") or not 0.0 <= trained < float("inf"):
        raise ValueError(f"token_weights: a sum of {total}, {trained} of trained tokens; expected positive numbers")
    return minibatch.with_fields(**{TOKEN_WEIGHTS: weights.float()}), Divisors(total or 1.0, trained or 1.0)


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The n sequences that the t tokens of a loss belong to, as this rank sees them."""

    of_token: Tensor  # [t] int64: the sequence of each token on this rank, 0 .. count - 1
    count: int  # n, the same on every context-parallel rank
    group: object = None
    """Ranks that share the tokens of a sequence (torch.distributed.ProcessGroup); None: this rank has all of them."""

    def sum(self, x: Tensor) -> Tensor:
        """Sum x [t] over the tokens of each sequence, on all context-parallel ranks: [n]. Differentiable.

        Collective where `group` is not None: every rank of it must call this, also one without tokens.
        """
        # In float64, so that neither the order of tokens nor their split over ranks shows in float32.
        sums = x.new_zeros(self.count, dtype=torch.float64).index_add(0, self.of_token, x.double())
        if self.group is not None:
            sums = _AllReduce.apply(sums, self.group)
        return sums.to(x.dtype) if x.is_floating_point() else sums.float()

    def spread(self, values: Tensor) -> Tensor:
        """Give each token the value of its sequence: [n] -> [t]."""
        return values.index_select(0, self.of_token)

    def mean(self, x: Tensor, mask: Tensor) -> Tensor:
        """Average x [t] over the tokens of each sequence where mask [t] is True: [n], 0 where there are none."""
        return self.sum(x * mask) / self.sum(mask).clamp(min=1)


class _AllReduce(torch.autograd.Function):
    """Sum over ranks. Every rank's loss depends on the sum, so the gradients of all ranks add up as well."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, group: object) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
