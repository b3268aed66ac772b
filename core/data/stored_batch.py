"""A batch in the object store: how it is dealt and cut, its pieces, and how ranks read them.

A piece holds sequences that the same ranks need, so that no token is stored twice and no rank fetches a token that it
does not run. The driver passes references on; it holds no tokens. Invariants: every sequence is in exactly one piece. A
rank fetches the pieces that it runs once a step, and those of others only where a lowered limit of memory has changed
the cut since the batch was stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from mcore_adapter.data.batch import (
    ROLLOUTS,
    ROUTED_EXPERTS,
    TOKEN_WEIGHTS,
    BatchShape,
    Divisors,
    PackedBatch,
    TokenWeights,
    index_of_tokens,
    read_shape,
    weigh_tokens,
)
from mcore_adapter.data.planner import BatchShard, PassLimits, Planner, Plans

if TYPE_CHECKING:
    from mcore_adapter.engine import LossFn


Unit = Literal["sequence", "group", "pair"]


def units_of(group_ids: np.ndarray, unit: Unit, rollouts: np.ndarray | None = None) -> np.ndarray:
    """Return the unit of each sequence, [N] int64, from 0 on without gaps; `group_ids` [N] ascend. `rollouts` [N]:
    number of the rollout that each is a branch of, also without gaps; None: there are no branches.

    Raises ValueError where a pair is incomplete."""
    if unit == "sequence":
        return np.arange(len(group_ids)) if rollouts is None else rollouts
    if unit == "group":
        return group_ids
    if rollouts is not None and rollouts.max() + 1 < len(rollouts):
        raise ValueError("algorithms of pairs compare single answers; the workflow returned rollouts with branches")
    if (np.bincount(group_ids) % 2).any():
        raise ValueError("algorithms of pairs need an even number of answers to each prompt; set group_size to one")
    return np.arange(len(group_ids)) // 2  # a group's sequences are adjacent


def deal_minibatches(units: np.ndarray, count: int, *, seed: int) -> list[list[int]]:
    """Deal the sequences at random into `count` minibatches of whole units.

    Where every sequence is a unit, these are the parts of split_minibatches(), whatever the algorithm."""
    parts = split_minibatches(int(units.max()) + 1, count, seed=seed)
    members: list[list[int]] = [[] for _ in range(int(units.max()) + 1)]
    for sequence, unit in enumerate(units.tolist()):
        members[unit].append(sequence)
    return [sorted(i for unit in part for i in members[unit]) for part in parts]


def split_minibatches(num_units: int, count: int, *, seed: int) -> list[list[int]]:
    """Deal the numbers of sequences, or of other units, at random into `count` parts whose sizes differ by at most one;
    none is empty."""
    order = np.random.default_rng(seed).permutation(num_units)
    return [sorted(map(int, part)) for part in np.array_split(order, min(count, num_units))]


@dataclass(frozen=True, kw_only=True)
class InferencePass:
    """An engine's results for every token of the batch."""

    engine: str
    kind: Literal["logprobs", "values", "entropy"] = "logprobs"
    limits: PassLimits
    temperature: float = 1.0
    """Of log-probabilities."""
    replay_routing: bool = False
    """Use the experts that the generators report."""


@dataclass(frozen=True, kw_only=True)
class UpdatePass:
    """One optimizer update of an engine on a minibatch."""

    engine: str
    minibatch: int
    loss: LossFn
    limits: PassLimits
    temperature: float = 1.0
    with_entropy: bool = False
    replay_routing: bool = False


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


def cut(
    shape: BatchShape, minibatches: Sequence[Sequence[int]], uses: Sequence[Use]
) -> tuple[list[Piece], Mapping[str, Plans], Mapping[str, Sequence[Plans]]]:
    """Plan the passes of a batch, and cut it so that each rank fetches what it runs. Sequences without any use form a
    piece as well. Return its pieces, and the plans of passes and updates; see StoredBatch."""
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
    return pieces, pass_plans, update_plans


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


def weights_field(engine: str) -> str:
    """Name of the array with the token weights of an engine's objective."""
    return f"{TOKEN_WEIGHTS}/{engine}"


class BatchWriter:
    """One batch of T tokens: its tokens first, then the fields to train on."""

    def __init__(
        self,
        put: Callable[[Arrays], Ref],
        *,
        token_ids: np.ndarray,  # [T] integers
        cu_seqlens: np.ndarray,  # [N + 1] int64
        loss_mask: np.ndarray,  # [T] bool
        routed_experts: np.ndarray | None = None,  # [T, layers, k]
        units: np.ndarray | None = None,  # [N] int64
        rollouts: np.ndarray | None = None,  # [N] int64
        minibatches: Sequence[Sequence[int]],
        uses: Sequence[Use],
    ) -> None:
        """Place the tokens. `units`: equal for sequences that run in one microbatch; None: any cut will do.
        `rollouts`: equal for sequences that weights count as one; None: there are no such sequences."""
        self._rollouts = rollouts
        self._put, self._token_ids, self._cu_seqlens, self._loss_mask = put, token_ids, cu_seqlens, loss_mask
        shape = read_shape(token_ids, cu_seqlens, loss_mask, units)
        arrays = {"token_ids": token_ids.astype(np.int32, copy=False), "loss_mask": loss_mask}
        if routed_experts is not None:
            arrays[ROUTED_EXPERTS] = routed_experts
        pieces, pass_plans, update_plans = cut(shape, minibatches, uses)
        self._runs = [_runs(piece.sequences, cu_seqlens) for piece in pieces]
        tokens = [put(_end_to_end(runs, arrays)) for runs in self._runs]
        self.stored = StoredBatch(
            shape=shape, minibatches=minibatches, pieces=pieces, tokens=tokens, pass_plans=pass_plans,
            update_plans=update_plans,
        )  # fmt: skip

    def put_fields(self, fields: Arrays, weights: Mapping[str, TokenWeights | None]) -> StoredFields:
        """Place per-token fields [T, ...]. `weights`: the token weights of each engine that trains; None: token_mean.

        Raises ValueError for a field of another length, and as weigh_tokens()."""
        for name, value in fields.items():
            if len(value) != len(self._token_ids):
                raise ValueError(f"field {name}: {len(value)} entries for {len(self._token_ids)} tokens")
        arrays, divisors = dict(fields), {}
        before = np.concatenate(([0], np.cumsum(self._loss_mask)))  # trained tokens before each token
        trained = np.diff(before[self._cu_seqlens])
        for engine, token_weights in weights.items():
            if token_weights is None:
                counts = [float(trained[np.asarray(part, np.int64)].sum() or 1) for part in self.stored.minibatches]
                divisors[engine] = [Divisors(count, count) for count in counts]
            else:
                arrays[weights_field(engine)], divisors[engine] = self._weigh(token_weights, fields)
        stored = [self._put(_end_to_end(runs, arrays)) for runs in self._runs]
        return StoredFields(fields=stored, divisors=divisors)

    def _weigh(self, token_weights: TokenWeights, fields: Arrays) -> tuple[np.ndarray, list[Divisors]]:
        """Return weights [T] float32, computed over whole minibatches."""
        tensors = {name: torch.from_numpy(value) for name, value in fields.items()}
        if self._rollouts is not None:
            tensors[ROLLOUTS] = torch.from_numpy(np.repeat(self._rollouts, np.diff(self._cu_seqlens)))
        batch = PackedBatch(
            token_ids=torch.from_numpy(self._token_ids).long(),
            cu_seqlens=torch.from_numpy(self._cu_seqlens),
            loss_mask=torch.from_numpy(self._loss_mask),
            fields=tensors,
        )
        weights, divisors = torch.zeros(batch.num_tokens), []
        for minibatch in self.stored.minibatches:
            weighed, sums = weigh_tokens(batch.select(minibatch), token_weights)
            weights[batch.token_index(minibatch)] = weighed.fields[TOKEN_WEIGHTS]
            divisors.append(sums)
        return weights.numpy(), divisors


def _runs(sequences: np.ndarray, cu_seqlens: np.ndarray) -> list[slice]:
    """Return the tokens of ascending sequences, those of adjacent sequences as one slice."""
    breaks = np.flatnonzero(np.diff(sequences) > 1)
    first = sequences[np.concatenate(([0], breaks + 1))]
    last = sequences[np.concatenate((breaks, [len(sequences) - 1]))]
    return [slice(*bounds) for bounds in zip(cu_seqlens[first].tolist(), cu_seqlens[last + 1].tolist(), strict=True)]


def _end_to_end(runs: Sequence[slice], arrays: Arrays) -> Arrays:
    """Return these tokens of every array, without a copy where they are adjacent."""
    if len(runs) == 1:
        return {name: values[runs[0]] for name, values in arrays.items()}
    return {name: np.concatenate([values[run] for run in runs]) for name, values in arrays.items()}


def assemble(results: Sequence[tuple[np.ndarray, np.ndarray]], cu_seqlens: np.ndarray) -> torch.Tensor:
    """Return per-token results of ranks, (sequences, their values end to end) each -> [T] float32, 0 where none has
    one."""
    out = np.zeros(int(cu_seqlens[-1]), np.float32)
    for sequences, values in results:
        place = 0
        for start, end in zip(cu_seqlens[sequences].tolist(), cu_seqlens[sequences + 1].tolist(), strict=True):
            out[start:end] = values[place : place + end - start]
            place += end - start
    return torch.from_numpy(out)


Fetch = Callable[[list[Ref]], list[Arrays]]


class RankBatch:
    """The batch of one step for one rank."""

    def __init__(self, stored: StoredBatch, reader: Reader, fetch: Fetch) -> None:
        self._stored, self._reader, self._fetch = stored, reader, fetch
        own = [i for i, piece in enumerate(stored.pieces) if reader in piece.readers]
        self._tokens = _Held(stored, stored.tokens, own, fetch)

    @property
    def minibatches(self) -> Sequence[Sequence[int]]:
        """Sequences of each minibatch."""
        return self._stored.minibatches

    def add_fields(self, fields: StoredFields) -> None:
        """Train on these."""
        own = [i for i, piece in enumerate(self._stored.pieces) if self._reader in piece.trainers]
        self._fields, self._divisors = _Held(self._stored, fields.fields, own, self._fetch), fields.divisors

    def whole(self, *, replay_routing: bool) -> BatchShard:
        """Return the whole batch, to run without gradients. `replay_routing`: with the generators' experts, if
        reported."""
        return BatchShard(
            shape=self._stored.shape,
            select=lambda chosen: self._select(chosen, replay_routing),
            owners=self._stored.owners(self._reader[0]),
            plans=self._stored.pass_plans.get(self._reader[0], {}),
        )

    def minibatch(self, index: int, engine: str, *, replay_routing: bool) -> BatchShard:
        """Return a minibatch to train `engine` on, with its token weights."""
        members = np.asarray(self.minibatches[index], np.int64)
        weights = weights_field(engine)

        def select(chosen: Sequence[int]) -> PackedBatch:
            sequences = members[np.asarray(chosen, np.int64)]
            batch = self._select(sequences, replay_routing)
            found = self._fields.select(sequences)
            own = found.get(weights, batch.loss_mask)
            fields = {name: value for name, value in found.items() if not name.startswith(weights_field(""))}
            return batch.with_fields(**fields, **{TOKEN_WEIGHTS: own.float()})

        plans = self._stored.update_plans.get(self._reader[0])
        return BatchShard(
            shape=self._stored.shape.select(members),
            select=select,
            divisors=self._divisors[engine][index],
            plans={} if plans is None else plans[index],
        )

    def _select(self, sequences: Sequence[int] | np.ndarray, replay_routing: bool) -> PackedBatch:
        chosen = np.asarray(sequences, np.int64)
        arrays = self._tokens.select(chosen)
        lens = torch.from_numpy(self._stored.shape.seq_lens[chosen])
        replayed = replay_routing and ROUTED_EXPERTS in arrays
        return PackedBatch(
            token_ids=arrays["token_ids"].long(),
            cu_seqlens=torch.cat((lens.new_zeros(1), lens.cumsum(0))),
            loss_mask=arrays["loss_mask"],
            fields={ROUTED_EXPERTS: arrays[ROUTED_EXPERTS]} if replayed else {},
        )


class _Held:
    """Arrays of some pieces of a batch, end to end."""

    def __init__(self, stored: StoredBatch, refs: Sequence[Ref], own: list[int], fetch: Fetch) -> None:
        """`own`: pieces to fetch at the first use."""
        self._shape: BatchShape = stored.shape
        self._pieces, self._refs, self._own, self._fetch = stored.pieces, refs, own, fetch
        self._starts = np.full(stored.shape.num_sequences, -1, np.int64)
        self._arrays: dict[str, Tensor] = {}
        self._num_tokens = 0

    def select(self, sequences: np.ndarray) -> dict[str, Tensor]:
        """Return arrays of these sequences, in this order."""
        if not self._num_tokens:
            self._add(self._own or [0])  # a rank without sequences needs the names and types
        missing = set(sequences[self._starts[sequences] < 0].tolist())
        if missing:
            self._add([i for i, piece in enumerate(self._pieces) if not missing.isdisjoint(piece.sequences.tolist())])
        lens = torch.from_numpy(self._shape.seq_lens[sequences])
        index = index_of_tokens(torch.from_numpy(self._starts[sequences]), lens)
        return {name: values[index] for name, values in self._arrays.items()}

    def _add(self, pieces: list[int]) -> None:
        fetched = self._fetch([self._refs[i] for i in pieces])
        for name in fetched[0]:
            held = [self._arrays[name].numpy()] if name in self._arrays else []
            copied = np.concatenate([*held, *(arrays[name] for arrays in fetched)])  # the store's pages are read-only
            self._arrays[name] = torch.from_numpy(copied)
        for i in pieces:
            sequences = self._pieces[i].sequences
            lens = self._shape.seq_lens[sequences]
            self._starts[sequences] = self._num_tokens + lens.cumsum() - lens
            self._num_tokens += int(lens.sum())
