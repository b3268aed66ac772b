"""A batch in the object store: references to its pieces, and the facts that every reader has.

A piece holds sequences that the same ranks need, so that no token is stored twice and no rank fetches a token that it
does not run. Invariant: every sequence is in exactly one piece. The driver passes references to these objects on; it
holds no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from mcore_adapter.data.planner import Planner
from mcore_adapter.data.shape import BatchShape
from mcore_adapter.data.weights import Divisors

Ref = Any
"""A reference to an object in the store (ray.ObjectRef), or the object itself where it is small."""
Reader = tuple[str, int]
"""Ranks that run the same sequences: (name of their group, data-parallel rank)."""
Arrays = Mapping[str, np.ndarray]
"""Per-token arrays of a piece, by name."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """A pass that a group of ranks will run: over the whole batch, or over each minibatch where it trains."""

    group: str
    planner: Planner
    trains: bool
    max_tokens_per_mb: int
    max_sequence_tokens: int

    def sequences(
        self, shape: BatchShape, minibatches: Sequence[Sequence[int]], owners: np.ndarray | None = None
    ) -> Iterator[tuple[Reader, list[int]]]:
        """Yield the readers of this pass with sequences that they run, as the engine will cut them. `owners`: who
        trains on each sequence, for a pass over the whole batch."""
        for part in minibatches if self.trains else [range(shape.num_sequences)]:
            own = shape.select(part)
            limit = self.planner.limit(own, self.max_tokens_per_mb, self.max_sequence_tokens)
            plan = self.planner.plan(own, limit, None if self.trains else owners)
            for dp_rank, microbatches in enumerate(plan):
                yield (self.group, dp_rank), [part[i] for microbatch in microbatches for i in microbatch]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Sequences with the same readers."""

    sequences: np.ndarray  # [n] int64, ascending
    readers: frozenset[Reader]
    """The ranks that run them in any pass."""
    trainers: frozenset[Reader]
    """The ranks that train on them."""


@dataclass(frozen=True, kw_only=True)
class StoredBatch:
    """What passes without gradients need."""

    shape: BatchShape
    minibatches: Sequence[Sequence[int]]
    pieces: Sequence[Piece]
    tokens: Sequence[Ref]
    """Arrays of each piece: token_ids int32, loss_mask bool, routed_experts where generators report them."""

    def owners(self, group: str) -> np.ndarray | None:
        """Return [N] int64, the data-parallel rank of `group` that trains on each sequence: passes before the update
        run where the tokens are needed anyway. None where a sequence has none, or several (of several engines)."""
        return _owners(self.shape.num_sequences, ((p.sequences, p.trainers) for p in self.pieces), group)


@dataclass(frozen=True, kw_only=True)
class StoredFields:
    """What updates need beside the tokens."""

    fields: Sequence[Ref]
    """Arrays of each piece: advantages, old_logprobs ..."""
    divisors: Mapping[str, Sequence[Divisors]]
    """Of each minibatch, by engine."""


def cut(shape: BatchShape, minibatches: Sequence[Sequence[int]], uses: Sequence[Use]) -> list[Piece]:
    """Return the pieces of a batch that is used in this way. Sequences without any use form a piece as well."""
    readers: list[set[Reader]] = [set() for _ in range(shape.num_sequences)]
    trainers: list[set[Reader]] = [set() for _ in range(shape.num_sequences)]
    for use in sorted(uses, key=lambda use: not use.trains):
        owners = None if use.trains else _owners(shape.num_sequences, enumerate(trainers), use.group)
        for reader, sequences in use.sequences(shape, minibatches, owners):
            for i in sequences:
                readers[i].add(reader)
                if use.trains:
                    trainers[i].add(reader)
    members: dict[tuple[frozenset[Reader], frozenset[Reader]], list[int]] = {}
    for i in range(shape.num_sequences):
        members.setdefault((frozenset(readers[i]), frozenset(trainers[i])), []).append(i)
    return [
        Piece(sequences=np.array(sequences, np.int64), readers=read_by, trainers=trained_by)
        for (read_by, trained_by), sequences in members.items()
    ]


def _owners(
    num_sequences: int, trainers: Iterable[tuple[np.ndarray | int, Set[Reader]]], group: str
) -> np.ndarray | None:
    owners = np.empty(num_sequences, np.int64)
    for sequences, readers in trainers:
        ranks = [dp_rank for name, dp_rank in readers if name == group]
        if len(ranks) != 1:
            return None
        owners[sequences] = ranks[0]
    return owners
