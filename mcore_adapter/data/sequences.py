"""Sums over the tokens of each sequence of a microbatch, for losses that need more than one token at a time.

Context parallelism spreads the tokens of a sequence over several ranks. Invariant: `Sequences.sum` returns the same on
every rank of such a group, and its gradient reaches the tokens on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The n sequences that the t tokens of a loss belong to, as this rank sees them."""

    of_token: Tensor  # [t] int64: the sequence of each token on this rank, 0 .. count - 1
    count: int  # n, the same on every context-parallel rank
    group: Any = None
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
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
