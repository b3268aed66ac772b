"""Preference pairs for DPO: read, tokenised, and cut into packed batches.

Invariant: only tokens of the two answers (end-of-sequence included) are trained on; the sequences of a pair are
adjacent, the chosen one first. Order of the pairs: core/data/epochs.py.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from core.data.epochs import EpochBatches
from mcore_adapter.data.batch import PAIR, PackedBatch
from rollout.data.encoder import Encoder
from rollout.data.examples import encode_answers
from rollout.data.left_out import evenly_spaced, level_of, sample_text
from rollout.data.preferences import Preference, PreferenceFields, read_preferences
from rollout.data.source import DataSource, NoneLeftError, as_source

logger = logging.getLogger(__name__)


class _Pair(NamedTuple):
    """Token ids; an answer ends with the end-of-sequence token."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def lens(self) -> tuple[int, int]:
        return len(self.prompt) + len(self.chosen), len(self.prompt) + len(self.rejected)


class PreferenceDataset(EpochBatches[_Pair]):
    """Tokenised pairs. Pairs with an answer that is too long, or with equal answers, are left out and counted."""

    COUNT, ITEMS = "num_pairs", "pairs"

    def __init__(
        self,
        source: str | Path | DataSource,
        encoder: Encoder,
        *,
        fields: PreferenceFields,
        max_seqlen: int,
        seed: int,
        shuffle: bool,
        sample: int | None = None,
    ) -> None:
        """Read and tokenise. `sample`: tokenise at most this many pairs, evenly spaced. Raises DatasetError for rows
        that are no pairs, and NoneLeftError where none is left."""
        path = as_source(source).path
        every = read_preferences(source, fields)
        read = [_encoded(pair, encoder) for pair in evenly_spaced(every, sample)]
        different = [pair for pair in read if pair.chosen != pair.rejected]
        pairs = [pair for pair in different if pair.prompt and max(pair.lens) <= max_seqlen]
        num_equal, num_long = len(read) - len(different), sum(max(pair.lens) > max_seqlen for pair in different)
        num_empty = len(different) - len(pairs) - num_long  # without a prompt
        lens = [max(pair.lens) for pair in read]
        if not pairs:
            raise NoneLeftError(
                f"{path}: none of {len(read)} pairs is left: {num_equal} have equal answers, {num_long} are longer "
                f"than dataset.max_seqlen={max_seqlen} tokens (the shortest has {min(lens, default=0)}), {num_empty} "
                "have no prompt"
            )
        logger.log(
            level_of(len(read) - len(pairs), len(read)),
            "%s: %s, %d left out: %d with equal answers, %d longer than max_seqlen=%d (the longest has %d tokens), "
            "%d without a prompt",
            path, sample_text(len(read), len(every), "pairs"), len(read) - len(pairs), num_equal, num_long, max_seqlen,
            max(lens), num_empty,
        )  # fmt: skip
        checksum = 0
        for pair in pairs:
            for ids in pair:
                checksum = zlib.crc32(np.array([*ids, -1], np.int64).tobytes(), checksum)
        super().__init__(pairs, checksum=checksum, seed=seed, shuffle=shuffle, share=len(read) / len(every))

    def num_tokens(self, item: _Pair) -> int:
        """Return the length of a pair, its prompt counted twice."""
        return sum(item.lens)

    def pack(self, items: Sequence[_Pair]) -> PackedBatch:
        """Lay pairs end to end, chosen before rejected, with the field PAIR."""
        sequences = [
            (pair.prompt, answer, sign * number)
            for number, pair in enumerate(items, start=1)
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
