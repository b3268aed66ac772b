"""What a batch is cut by: numbers per sequence, known everywhere, while the tokens are only where they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mcore_adapter.data.batch import PAIR, PackedBatch


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """N sequences of a batch. Equal batches have equal shapes, and from a shape follows every cut of the batch."""

    seq_lens: np.ndarray  # [N] int64
    prompt_lens: np.ndarray  # [N] int64: tokens before the first trained one; all of them where none is trained
    prompt_ids: np.ndarray  # [N] int64: equal where these tokens are equal
    units: np.ndarray | None = None
    """[N] int64: equal for sequences that run in one microbatch; None: each is a unit of its own."""

    @property
    def num_sequences(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return int(self.seq_lens.sum())

    def select(self, sequences: Sequence[int] | np.ndarray) -> BatchShape:
        """Return the shape of the batch of these sequences, in this order."""
        chosen = np.asarray(sequences, np.int64)
        return BatchShape(
            seq_lens=self.seq_lens[chosen], prompt_lens=self.prompt_lens[chosen], prompt_ids=self.prompt_ids[chosen],
            units=None if self.units is None else self.units[chosen],
        )  # fmt: skip


def shape_of(batch: PackedBatch) -> BatchShape:
    """Return the shape of a batch whose tokens are all here."""
    pair = batch.fields.get(PAIR)
    units = None if pair is None else pair[batch.cu_seqlens[:-1]].abs().numpy()
    return read_shape(batch.token_ids.numpy(), batch.cu_seqlens.numpy(), batch.loss_mask.numpy(), units)


def read_shape(
    token_ids: np.ndarray, cu_seqlens: np.ndarray, loss_mask: np.ndarray, units: np.ndarray | None = None
) -> BatchShape:
    """Return the shape of N sequences laid end to end: token_ids and loss_mask [T], cu_seqlens [N + 1], units [N]."""
    prompt_lens = leading_prompt_lens(cu_seqlens, loss_mask)
    number_of: dict[bytes, int] = {}
    prompts = prompts_of(token_ids, cu_seqlens, prompt_lens)
    return BatchShape(
        seq_lens=np.diff(cu_seqlens),
        prompt_lens=prompt_lens,
        prompt_ids=np.array([number_of.setdefault(prompt, len(number_of)) for prompt in prompts], np.int64),
        units=units,
    )


def given_units(units: np.ndarray) -> list[list[int]]:
    """Return the sequences of each unit, in the order of their first ones."""
    members: dict[int, list[int]] = {}
    for sequence, unit in enumerate(units.tolist()):
        members.setdefault(unit, []).append(sequence)
    return list(members.values())


def leading_prompt_lens(cu_seqlens: np.ndarray, loss_mask: np.ndarray) -> np.ndarray:
    """Return [N] int64: tokens of each sequence before its first trained one; all of them where none is trained."""
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    trained = np.flatnonzero(loss_mask)
    first = np.append(trained, cu_seqlens[-1])[np.searchsorted(trained, starts)]
    return np.minimum(first, ends) - starts


def prompts_of(token_ids: np.ndarray, cu_seqlens: np.ndarray, prompt_lens: np.ndarray) -> list[bytes]:
    """Return the first prompt_lens [N] tokens of each sequence."""
    return [
        token_ids[start : start + n].tobytes()
        for start, n in zip(cu_seqlens[:-1].tolist(), prompt_lens.tolist(), strict=True)
    ]


def prompt_units(shape: BatchShape, *, max_tokens: int, at_least: int = 1) -> tuple[list[list[int]], list[int]]:
    """Return sequences that should stay together because they share a prompt: (units, tokens of each unit).

    A unit of several sequences has at most `max_tokens` tokens, the shared prompt counted once. There are `at_least` so
    many units, or as many as sequences.
    """
    lens, prompt_lens = shape.seq_lens.tolist(), shape.prompt_lens.tolist()
    units: list[list[int]] = []
    sizes: list[int] = []
    unit_of: dict[int, int] = {}
    for i, prompt in enumerate(shape.prompt_ids.tolist()):
        own = lens[i] - prompt_lens[i]
        unit = unit_of.get(prompt)
        if unit is not None and sizes[unit] + own <= max_tokens:
            units[unit].append(i)
            sizes[unit] += own
        else:
            unit_of[prompt] = len(units)
            units.append([i])
            sizes.append(lens[i])
    while len(units) < min(at_least, len(lens)):
        largest = max((u for u, unit in enumerate(units) if len(unit) > 1), key=lambda u: sizes[u])
        half = units[largest][::2]
        del units[largest][::2]
        own = sum(lens[i] - prompt_lens[i] for i in half)
        sizes[largest] -= own
        sizes.append(prompt_lens[half[0]] + own)
        units.append(half)
    return units, sizes
