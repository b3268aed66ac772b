"""How a model's ranks cut a batch: which sequences each data-parallel rank runs, and in which microbatches.

A plan follows from the shape of the batch and plain settings alone. The process that cuts a batch makes it once, and it
travels with the batch; ranks make another one, all the same, where a limit of memory was lowered since.

Invariant: every sequence is in exactly one microbatch, no microbatch holds more than max_tokens_per_mb tokens, and
every data-parallel rank has the same number of microbatches; one is empty (a zero-weight filler) only where there are
fewer sequences than microbatches.
"""

import bisect
import heapq
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mcore_adapter.data.batch import (
    BatchShape,
    Divisors,
    PackedBatch,
    TokenWeights,
    given_units,
    prompt_units,
    shape_of,
    weigh_tokens,
)
from model_specs.config import ModelConfig

Microbatch = list[int]
"""Indices of the sequences that run together, longest first."""


def plan_microbatches(
    seq_lens: Sequence[int],
    *,
    dp: int,
    max_tokens_per_mb: int,
    costs: Sequence[float] | None = None,
    min_microbatches: int = 1,
    multiple_of: int = 1,
) -> list[list[Microbatch]]:
    """Assign sequences to [dp][num_microbatches], balanced by estimated cost, with as few microbatches as fit.

    `costs` are what to balance by, one for each sequence; without them it is the tokens. What is called a sequence may
    be several that should stay together. `min_microbatches` is what a pipeline would like to have; it
    is followed as far as there are sequences to share out. `multiple_of` is what the schedule demands (interleaved
    pipelines: the pipeline size) and always holds. Raises ValueError when a sequence alone exceeds max_tokens_per_mb.
    """
    if not seq_lens:
        raise ValueError("a batch of 0 sequences cannot be cut into microbatches")
    check_longest(seq_lens, max_tokens_per_mb)
    costs = seq_lens if costs is None else costs
    order = sorted(range(len(seq_lens)), key=lambda i: (-seq_lens[i], i))
    wanted = min(min_microbatches, len(seq_lens) // dp)
    count = max(wanted, -(-sum(seq_lens) // (dp * max_tokens_per_mb)), 1)
    while True:
        count = -(-count // multiple_of) * multiple_of
        bins = _pack(order, seq_lens, costs, dp * count, max_tokens_per_mb)
        if bins is not None:
            return _share_out(bins, costs, dp)
        count += 1


def check_longest(seq_lens: Sequence[int], max_tokens_per_mb: int) -> None:
    """Raise ValueError when a sequence alone exceeds max_tokens_per_mb."""
    longest = max(range(len(seq_lens)), key=lambda i: seq_lens[i])
    if seq_lens[longest] > max_tokens_per_mb:
        raise ValueError(
            f"max_tokens_per_mb={max_tokens_per_mb}: sequence {longest} of the batch has {seq_lens[longest]} tokens "
            f"and cannot be split; set it to at least {seq_lens[longest]}"
        )


def _pack(
    order: Sequence[int], seq_lens: Sequence[int], costs: Sequence[float], num_bins: int, capacity: int
) -> list[Microbatch] | None:
    """Pack the longest sequence first, each into the cheapest bin that still has room; if that fails for one, into the
    fullest bin instead of the cheapest. Returns None when neither places all sequences."""
    return _pack_cheapest(order, seq_lens, costs, num_bins, capacity) or _pack_tightest(
        order, seq_lens, num_bins, capacity
    )


def _pack_cheapest(
    order: Sequence[int], seq_lens: Sequence[int], costs: Sequence[float], num_bins: int, capacity: int
) -> list[Microbatch] | None:
    bins: list[Microbatch] = [[] for _ in range(num_bins)]
    tokens = [0] * num_bins
    heap = [(0.0, b) for b in range(num_bins)]
    for i in order:
        full = []
        while heap and tokens[heap[0][1]] + seq_lens[i] > capacity:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, b = heap[0]
        heapq.heapreplace(heap, (cost + costs[i], b))
        bins[b].append(i)
        tokens[b] += seq_lens[i]
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _pack_tightest(
    order: Sequence[int], seq_lens: Sequence[int], num_bins: int, capacity: int
) -> list[Microbatch] | None:
    """Pack by best fit decreasing, then move the shortest sequences of the fullest bins to empty ones."""
    bins: list[Microbatch] = [[] for _ in range(num_bins)]
    by_room = [(capacity, b) for b in range(num_bins)]  # sorted
    for i in order:
        position = bisect.bisect_left(by_room, (seq_lens[i], 0))
        if position == num_bins:
            return None
        room, b = by_room.pop(position)
        bins[b].append(i)
        bisect.insort(by_room, (room - seq_lens[i], b))
    for empty in (b for b in bins if not b):
        donor = max(bins, key=len)
        if len(donor) > 1:
            empty.append(donor.pop())
    return bins


def _share_out(bins: list[Microbatch], costs: Sequence[float], dp: int) -> list[list[Microbatch]]:
    """Distribute bins as [dp][len(bins) / dp]: the most expensive bin first, to the cheapest rank that still takes one;
    each rank runs its microbatches from the most expensive (the peak of memory comes first) to the cheapest."""
    per_rank = len(bins) // dp
    totals = [sum(costs[i] for i in b) for b in bins]
    ranks: list[list[Microbatch]] = [[] for _ in range(dp)]
    heap = [(0.0, r) for r in range(dp)]
    for b in sorted(range(len(bins)), key=lambda b: (-totals[b], b)):
        cost, r = heapq.heappop(heap)
        ranks[r].append(bins[b])
        if len(ranks[r]) < per_rank:
            heapq.heappush(heap, (cost + totals[b], r))
    return ranks


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassLimits:
    """Tokens of a microbatch in one pass."""

    max_tokens_per_mb: int
    max_sequence_tokens: int = 0
    """Where a sequence (or a unit of sequences) is longer than max_tokens_per_mb, microbatches hold as many tokens as
    it has, up to this number: what is configured, where max_tokens_per_mb was lowered after out-of-memory."""


@dataclass(frozen=True, kw_only=True)
class Planner:
    """What the parallel layout and the model require of a cut."""

    dp: int
    pp: int = 1
    interleaved: bool = False
    """Pipeline stages of several parts, whose schedule runs microbatches in rounds of the pipeline's size."""
    sequence_multiple: int = 1
    """Each sequence is padded to a multiple of it."""
    share_prompts: bool = False
    """A prompt runs once for all its completions of a microbatch."""
    attention_cost: float = 0.0
    """Cost of a token pair relative to that of a token."""

    def padded_lens(self, shape: BatchShape) -> np.ndarray:
        """Return [N] int64, padding included."""
        return -(-shape.seq_lens // self.sequence_multiple) * self.sequence_multiple

    def limit(self, shape: BatchShape, limits: PassLimits) -> int:
        """Return the tokens of a microbatch of this batch."""
        longest = self.padded_lens(shape)
        if shape.units is not None:
            longest = np.bincount(np.unique(shape.units, return_inverse=True)[1], weights=longest)
        return max(limits.max_tokens_per_mb, min(int(longest.max()), limits.max_sequence_tokens))

    def plan(self, shape: BatchShape, limit: int, owners: np.ndarray | None = None) -> list[list[Microbatch]]:
        """Return sequences of every microbatch of every data-parallel rank: [dp][num_microbatches].

        `owners`, [N] int64: the rank that must run each sequence; without them the ranks are balanced. Raises
        ValueError for an empty sequence, or one (or a unit) that is longer than `limit`."""
        if int(shape.seq_lens.min()) < 1:
            raise ValueError(f"sequence {int(shape.seq_lens.argmin())} of the batch has no tokens")
        min_microbatches = 2 * self.pp if self.pp > 1 else 1  # half of a pipeline's bubble is gone at 2 a stage
        if owners is None or self.dp == 1:
            return self._plan(shape, limit, min_microbatches)
        return self._plan_of_owners(shape, limit, min_microbatches, owners)

    def _plan_of_owners(
        self, shape: BatchShape, limit: int, min_microbatches: int, owners: np.ndarray
    ) -> list[list[Microbatch]]:
        """Plan each rank alone, until all have the same number of microbatches."""
        alone = replace(self, dp=1)
        owned = [np.flatnonzero(owners == rank) for rank in range(self.dp)]
        plans: list[list[Microbatch]] = [[] for _ in owned]
        count = min_microbatches
        while any(len(plan) != count for plan in plans):
            for rank, own in enumerate(owned):
                if len(plans[rank]) != count and len(own):
                    (plan,) = alone._plan(shape.select(own), limit, count)
                    plans[rank] = [own[microbatch].tolist() for microbatch in plan]
                plans[rank] += [[] for _ in range(count - len(plans[rank]))]
            count = max(map(len, plans))
        return plans

    def _plan(self, shape: BatchShape, limit: int, min_microbatches: int) -> list[list[Microbatch]]:
        padded = self.padded_lens(shape).tolist()
        multiple_of = self.pp if self.interleaved else 1
        units, sizes = [[i] for i in range(len(padded))], padded
        if shape.units is not None:
            units = given_units(shape.units)
            sizes = [sum(padded[i] for i in unit) for unit in units]
        elif self.share_prompts:
            check_longest(padded, limit)
            # A fourth of a microbatch that everybody gets: small enough to balance, large enough to share.
            fair = shape.num_tokens // (4 * self.dp * min_microbatches)
            # No rank runs a filler beside one that holds several completions of a prompt.
            everywhere = self.dp * multiple_of
            units, sizes = prompt_units(shape, max_tokens=min(limit, fair), at_least=everywhere)
        plan = plan_microbatches(
            sizes,
            dp=self.dp,
            max_tokens_per_mb=limit,
            costs=[
                size + self.attention_cost * sum(padded[i] ** 2 for i in unit)
                for unit, size in zip(units, sizes, strict=True)
            ],
            min_microbatches=min_microbatches,
            multiple_of=multiple_of,
        )
        cut = [[[i for unit in microbatch for i in units[unit]] for microbatch in rank] for rank in plan]
        if logger.isEnabledFor(logging.DEBUG):
            tokens = [[sum(padded[i] for i in microbatch) for microbatch in rank] for rank in cut]
            logger.debug("%d sequences in microbatches of at most %d tokens, by rank: %s", len(padded), limit, tokens)
        return cut


def attention_cost(config: ModelConfig) -> float:
    """Return the cost of a token pair relative to that of a token: causal attention against the matrix products, in
    FLOPs."""
    if config.mla is not None:
        attention_width = config.num_heads * (config.mla.qk_head_dim + config.mla.v_head_dim) // 2
    else:
        attention_width = config.num_heads * config.head_dim
    kv_width = 0 if config.mla else config.num_kv_heads * config.head_dim
    ffn_width = config.intermediate_size
    if config.moe is not None:
        ffn_width = config.moe.top_k * config.moe.intermediate_size + config.moe.shared_intermediate_size
    per_layer = config.hidden_size * (2 * attention_width + 2 * kv_width + 3 * ffn_width)
    linear = config.num_layers * per_layer + config.vocab_size * config.hidden_size
    return config.num_layers * attention_width / linear


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
