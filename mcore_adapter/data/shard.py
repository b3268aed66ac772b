"""A batch, or a minibatch of it, as one rank sees it: the shape of all of it, and the tokens that this rank runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mcore_adapter.data.batch import PackedBatch
from mcore_adapter.data.microbatch import Microbatch
from mcore_adapter.data.planner import Planner
from mcore_adapter.data.shape import BatchShape, shape_of
from mcore_adapter.data.weights import Divisors, TokenWeights, weigh_tokens

Plans = Mapping[tuple[Planner, int], list[list[Microbatch]]]
"""Planner and tokens of a microbatch -> its plan, [dp][num_microbatches]."""


@dataclass(frozen=True, kw_only=True)
class BatchShard:
    """What an engine runs a pass over. To train on it, `select` gives the field "token_weights"."""

    shape: BatchShape
    select: Callable[[Sequence[int]], PackedBatch]
    """The tokens of these sequences of `shape`, in this order; called with those of this rank's microbatches."""
    divisors: Divisors = Divisors(1.0, 1.0)
    """Sums of the token weights of the whole batch."""
    owners: np.ndarray | None = None  # [N] int64
    """The data-parallel rank that has the tokens of each sequence; None: any may run it."""
    plans: Plans = field(default_factory=dict)
    """Those that were made with the batch."""

    def plan(self, planner: Planner, limit: int) -> list[list[Microbatch]]:
        """Return the plan that came with the batch, or make one. Raises as Planner.plan()."""
        return self.plans.get((planner, limit)) or planner.plan(self.shape, limit, self.owners)


def whole(batch: PackedBatch | BatchShard) -> BatchShard:
    """Return the shard of a rank that has all tokens; a shard as it is."""
    return batch if isinstance(batch, BatchShard) else BatchShard(shape=shape_of(batch), select=batch.select)


def weighed(batch: PackedBatch | BatchShard, token_weights: TokenWeights) -> BatchShard:
    """Return the same as whole(), with the token weights and their sums; a shard has them. Raises as weigh_tokens()."""
    if isinstance(batch, BatchShard):
        return batch
    weighed_batch, divisors = weigh_tokens(batch, token_weights)
    return BatchShard(shape=shape_of(batch), select=weighed_batch.select, divisors=divisors)
