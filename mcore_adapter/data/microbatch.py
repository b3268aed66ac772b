"""Cuts a minibatch into microbatches: which sequences each data-parallel rank runs together.

Every rank computes the same plan from the same lengths, so no communication is needed. Invariant: every sequence is in
exactly one microbatch, no microbatch holds more than max_tokens_per_mb tokens, and every data-parallel rank has the
same number of microbatches; one is empty (a zero-weight filler) only where there are fewer sequences than microbatches.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

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
