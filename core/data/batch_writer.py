"""Places a batch in the object store, cut into the pieces that trainer ranks need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from core.data.stored_batch import Arrays, Ref, StoredBatch, StoredFields, Use, cut
from mcore_adapter.data.batch import ROUTED_EXPERTS, PackedBatch
from mcore_adapter.data.sequences import ROLLOUTS, TOKEN_WEIGHTS, Divisors, TokenWeights, weigh_tokens
from mcore_adapter.data.shape import read_shape


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
        planned = cut(shape, minibatches, uses)
        self._runs = [_runs(piece.sequences, cu_seqlens) for piece in planned.pieces]
        tokens = [put(_end_to_end(runs, arrays)) for runs in self._runs]
        self.stored = StoredBatch(
            shape=shape, minibatches=minibatches, pieces=planned.pieces, tokens=tokens,
            pass_plans=planned.pass_plans, update_plans=planned.update_plans,
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
