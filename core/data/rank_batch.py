"""A stored batch in the process of a trainer rank: what it fetched, in memory of its own.

Invariant: a rank fetches the pieces that it runs once a step, and those of others only where a lowered limit of memory
has changed the cut since the batch was stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from core.data.batch_writer import weights_field
from core.data.stored_batch import Arrays, Reader, Ref, StoredBatch, StoredFields
from mcore_adapter.data.batch import ROUTED_EXPERTS, PackedBatch, index_of_tokens
from mcore_adapter.data.planner import BatchShard
from mcore_adapter.data.sequences import TOKEN_WEIGHTS
from mcore_adapter.data.shape import BatchShape

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
