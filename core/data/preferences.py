"""Preference pairs for DPO: read, tokenised, and cut into packed batches.

Invariant: only tokens of the two answers (end-of-sequence included) are trained on; the sequences of a pair are
adjacent, the chosen one first; epoch e visits the pairs in an order that is a function of (seed, e) alone.
"""

from __future__ import annotations

import logging
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mcore_adapter.data.batch import PAIR, PackedBatch
from rollout.data.encoder import Encoder
from rollout.data.examples import encode_answers
from rollout.data.preferences import Preference, PreferenceFields, read_preferences
from rollout.data.prompts import check_same_stream
from rollout.data.source import DatasetError, DataSource, as_source

logger = logging.getLogger(__name__)


class _Pair(NamedTuple):
    """Token ids; an answer ends with the end-of-sequence token."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def lens(self) -> tuple[int, int]:
        return len(self.prompt) + len(self.chosen), len(self.prompt) + len(self.rejected)


class PreferenceDataset:
    """Tokenised pairs. Pairs with an answer that is too long, or with equal answers, are left out and counted."""

    def __init__(
        self,
        source: str | Path | DataSource,
        encoder: Encoder,
        *,
        fields: PreferenceFields,
        max_seqlen: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        """Raises DatasetError for rows that are no pairs, and where none is left."""
        path = as_source(source).path
        read = [_encoded(pair, encoder) for pair in read_preferences(source, fields)]
        different = [pair for pair in read if pair.chosen != pair.rejected]
        self._pairs = [pair for pair in different if pair.prompt and max(pair.lens) <= max_seqlen]
        num_equal, num_long = len(read) - len(different), len(different) - len(self._pairs)
        if not self._pairs:
            raise DatasetError(
                f"{path}: none of {len(read)} pairs is left: {num_equal} have equal answers, {num_long} are longer "
                f"than dataset.max_seqlen={max_seqlen}"
            )
        logger.info(
            "%s: %d pairs, %d with equal answers, %d longer than max_seqlen=%d", path, len(self), num_equal, num_long,
            max_seqlen,
        )  # fmt: skip
        self._checksum = 0
        for pair in self._pairs:
            for ids in pair:
                self._checksum = zlib.crc32(np.array([*ids, -1], np.int64).tobytes(), self._checksum)
        self._seed, self._shuffle = seed, shuffle

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._pairs)

    def state_dict(self) -> dict[str, int]:
        """Return what identifies the pairs and their order."""
        return {"num_pairs": len(self), "checksum": self._checksum, "seed": self._seed, "shuffle": self._shuffle}

    def check_continues(self, state: Any) -> None:
        """Raise DatasetError unless the run that wrote `state` visits the same pairs in the same order."""
        settings = {
            "num_pairs": "dataset.train_path or max_seqlen",
            "checksum": "dataset.train_path",
            "seed": "seed",
            "shuffle": "shuffle_dataset",
        }
        check_same_stream(state, self.state_dict(), settings)

    @property
    def mean_tokens(self) -> float:
        """Mean length of a pair, its prompt counted twice."""
        return float(np.mean([sum(pair.lens) for pair in self._pairs]))

    def batch(self, epoch: int, epoch_step: int, batch_size: int) -> PackedBatch:
        """Return batch `epoch_step` (from 1) of `epoch` (from 1), `batch_size` pairs; the last one of an epoch may be
        smaller."""
        order = np.arange(len(self))
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self))
        return pack_pairs([self._pairs[i] for i in order[(epoch_step - 1) * batch_size : epoch_step * batch_size]])

    def in_order(self, batch_size: int) -> list[PackedBatch]:
        """Return every pair once, as they stand in the file."""
        return [pack_pairs(self._pairs[i : i + batch_size]) for i in range(0, len(self), batch_size)]


def pack_pairs(pairs: list[_Pair]) -> PackedBatch:
    """Lay pairs end to end, chosen before rejected, with the field PAIR."""
    sequences = [
        (pair.prompt, answer, sign * number)
        for number, pair in enumerate(pairs, start=1)
        for answer, sign in ((pair.chosen, 1), (pair.rejected, -1))
    ]
    lens = torch.tensor([len(prompt) + len(answer) for prompt, answer, _ in sequences])
    return PackedBatch(
        token_ids=torch.tensor([t for prompt, answer, _ in sequences for t in prompt + answer]),
        cu_seqlens=torch.cat((lens.new_zeros(1), lens.cumsum(0))),
        loss_mask=torch.tensor([x for p, a, _ in sequences for x in [False] * len(p) + [True] * len(a)]),
        fields={PAIR: torch.tensor([pair for _, _, pair in sequences]).repeat_interleave(lens)},
    )


def _encoded(pair: Preference, encoder: Encoder) -> _Pair:
    """Tokenise a pair; both answers end with an end token."""
    prompt, (chosen, rejected) = encode_answers(encoder, pair.prompt, [pair.chosen, pair.rejected], place=pair.place)
    return _Pair(prompt, chosen, rejected)
