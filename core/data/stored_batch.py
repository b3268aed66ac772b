"""A batch in the object store: references to its pieces, and the facts that every reader has.

A piece holds sequences that the same ranks need, so that no token is stored twice and no rank fetches a token that it
does not run. Invariant: every sequence is in exactly one piece. The driver passes references to these objects on; it
holds no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mcore_adapter.data.planner import PassLimits, Planner, Plans
from mcore_adapter.data.sequences import Divisors
from mcore_adapter.data.shape import BatchShape

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
    limits: PassLimits

    def plan(self, shape: BatchShape, owners: np.ndarray | None = None) -> Plans:
        """Return the plan of this pass over the sequences of `shape`. `owners`: who trains on each of them, for a pass
        over the whole batch."""
        limit = self.planner.limit(shape, self.limits)
        return {(self.planner, limit): self.planner.plan(shape, limit, None if self.trains else owners)}


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
    pass_plans: Mapping[str, Plans] = field(default_factory=dict)
    """Of passes over the whole batch, by group."""
    update_plans: Mapping[str, Sequence[Plans]] = field(default_factory=dict)
    """Of each minibatch, by group."""

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


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The pieces of a batch, and the plans of microbatches that it was cut for (see StoredBatch)."""

    pieces: Sequence[Piece]
    pass_plans: Mapping[str, Plans]
    update_plans: Mapping[str, Sequence[Plans]]


def cut(shape: BatchShape, minibatches: Sequence[Sequence[int]], uses: Sequence[Use]) -> Cut:
    """Plan the passes of a batch, and cut it so that each rank fetches what it runs. Sequences without any use form a
    piece as well."""
    count = shape.num_sequences
    readers: list[set[Reader]] = [set() for _ in range(count)]
    trainers: list[set[Reader]] = [set() for _ in range(count)]
    pass_plans: dict[str, dict[tuple[Planner, int], list[list[list[int]]]]] = {}
    update_plans: dict[str, list[dict[tuple[Planner, int], list[list[list[int]]]]]] = {}
    for use in sorted(uses, key=lambda use: not use.trains):
        if use.trains:
            plans = [use.plan(shape.select(part)) for part in minibatches]
            for known, new in zip(update_plans.setdefault(use.group, [{} for _ in plans]), plans, strict=True):
                known.update(new)
            _note(readers, use.group, minibatches, plans)
            _note(trainers, use.group, minibatches, plans)
        else:
            plan = use.plan(shape, _owners(count, enumerate(trainers), use.group))
            pass_plans.setdefault(use.group, {}).update(plan)
            _note(readers, use.group, [range(count)], [plan])
    members: dict[tuple[frozenset[Reader], frozenset[Reader]], list[int]] = {}
    for i in range(count):
        members.setdefault((frozenset(readers[i]), frozenset(trainers[i])), []).append(i)
    pieces = [
        Piece(sequences=np.array(sequences, np.int64), readers=read_by, trainers=trained_by)
        for (read_by, trained_by), sequences in members.items()
    ]
    return Cut(pieces=pieces, pass_plans=pass_plans, update_plans=update_plans)


def _note(ranks: list[set[Reader]], group: str, parts: Sequence[Sequence[int]], plans: Sequence[Plans]) -> None:
    """Add to each sequence the ranks of `group` that run it; `plans` are of the `parts` of the batch."""
    for part, made in zip(parts, plans, strict=True):
        for plan in made.values():
            for dp_rank, microbatches in enumerate(plan):
                for i in (i for microbatch in microbatches for i in microbatch):
                    ranks[part[i]].add((group, dp_rank))


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
