"""Preference pairs for DPO: read, tokenised, and cut into packed batches.

Invariant: only tokens of the two answers (end-of-sequence included) are trained on; the sequences of a pair are
adjacent, the chosen one first. Order of the pairs: core/data/epochs.py.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from core.data.epochs import EpochBatches, pack_sequences
from mcore_adapter.data.batch import PAIR, PackedBatch
from rollout.data.encoder import Encoder
from rollout.data.examples import MaskedSequence, encode_examples, first_row
from rollout.data.left_out import evenly_spaced, level_of, sample_text
from rollout.data.rows import Preference, PreferenceFields, checksum_of, read_preferences
from rollout.data.source import DatasetError, DataSource, NoneLeftError, as_source

logger = logging.getLogger(__name__)


class _Pair(NamedTuple):
    """Two answers to one prompt."""

    chosen: MaskedSequence
    rejected: MaskedSequence

    @property
    def lens(self) -> tuple[int, int]:
        return len(self.chosen.token_ids), len(self.rejected.token_ids)


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
        examples = evenly_spaced(every, sample)
        read = _pairs(examples, encode_examples(encoder, [answer for pair in examples for answer in pair]))
        different = [pair for pair in read if pair.chosen.token_ids != pair.rejected.token_ids]
        pairs = [pair for pair in different if not pair.chosen.loss_mask[0] and max(pair.lens) <= max_seqlen]
        num_equal, num_long = len(read) - len(different), sum(max(pair.lens) > max_seqlen for pair in different)
        num_empty = len(different) - len(pairs) - num_long  # without a prompt
        lens = [max(pair.lens) for pair in read]
        if not pairs:
            raise NoneLeftError(
                f"{path}: none of {len(read)} pairs is left: {num_equal} have equal answers, {num_long} are longer "
                f"than dataset.max_seqlen={max_seqlen} tokens (the shortest has {min(lens, default=0)}), {num_empty} "
                "have no prompt"
            )
        for answer in pairs[0]:
            logger.info("%s", first_row(encoder, answer))
        logger.log(
            level_of(len(read) - len(pairs), len(read)),
            "%s: %s, %d left out: %d with equal answers, %d longer than max_seqlen=%d (the longest has %d tokens), "
            "%d without a prompt",
            path, sample_text(len(read), len(every), "pairs"), len(read) - len(pairs), num_equal, num_long, max_seqlen,
            max(lens), num_empty,
        )  # fmt: skip
        answers = (answer for pair in pairs for answer in examples[pair.chosen.row // 2])
        checksum = checksum_of(answers, encoder.checksum)
        super().__init__(pairs, checksum=checksum, seed=seed, shuffle=shuffle, share=len(read) / len(every))

    def num_tokens(self, item: _Pair) -> int:
        """Return the length of a pair, its prompt counted twice."""
        return sum(item.lens)

    def pack(self, items: Sequence[_Pair]) -> PackedBatch:
        """Lay pairs end to end, chosen before rejected, with the field PAIR."""
        lens = torch.tensor([length for pair in items for length in pair.lens])
        signed = torch.tensor([sign * number for number in range(1, len(items) + 1) for sign in (1, -1)])
        batch = pack_sequences([answer for pair in items for answer in pair])
        return replace(batch, fields={PAIR: signed.repeat_interleave(lens)})


def _pairs(examples: Sequence[Preference], sequences: Sequence[MaskedSequence]) -> list[_Pair]:
    """Return the sequences of both answers of each example. Raises DatasetError where an answer has not just one."""
    if [s.row for s in sequences] != list(range(2 * len(examples))):
        counts = Counter(s.row for s in sequences)
        place = next(e.chosen.place for i, e in enumerate(examples) if (counts[2 * i], counts[2 * i + 1]) != (1, 1))
        raise DatasetError(
            f"{place}: an answer of a pair must be one sequence with a trained turn; the chat template writes earlier "
            "turns of this one in another way, or none is trained: let the answers differ in their last turn only"
        )
    return [_Pair(*answers) for answers in zip(sequences[::2], sequences[1::2], strict=True)]
