"""Examples of supervised fine-tuning: read, tokenised, and cut into packed batches.

Invariant: only tokens of the assistant (end tokens included) are trained on. Order of the rows: core/data/epochs.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from core.data.epochs import EpochBatches, pack_sequences
from mcore_adapter.data.batch import PackedBatch
from rollout.data.encoder import Encoder
from rollout.data.examples import MaskedSequence, encode_examples, first_row
from rollout.data.left_out import evenly_spaced, level_of, sample_text
from rollout.data.rows import checksum_of, read_examples
from rollout.data.source import DataSource, NoneLeftError, as_source

logger = logging.getLogger(__name__)


class AnswerDataset(EpochBatches[MaskedSequence]):
    """Tokenised sequences with the tokens to train on."""

    COUNT, ITEMS = "num_rows", "sequences"

    def __init__(
        self,
        source: str | Path | DataSource,
        encoder: Encoder,
        *,
        max_seqlen: int,
        seed: int,
        shuffle: bool,
        sample: int | None = None,
    ) -> None:
        """Read and tokenise. `sample`: tokenise at most this many rows, evenly spaced. Raises DatasetError for rows
        that cannot be used, and NoneLeftError where none is left."""
        source = as_source(source)
        every = read_examples(source)
        examples = evenly_spaced(every, sample)
        sequences = encode_examples(encoder, examples)
        rows = [s for s in sequences if 0 < sum(s.loss_mask) < len(s.token_ids) <= max_seqlen]
        lens = [len(s.token_ids) for s in sequences]
        num_long = sum(length > max_seqlen for length in lens)
        num_empty = len(sequences) - len(rows) - num_long
        if not rows:
            raise NoneLeftError(
                f"{source.path}: none of {len(sequences)} sequences is left: {num_long} have more than "
                f"dataset.max_seqlen={max_seqlen} tokens (the shortest has {min(lens)}), {num_empty} have no "
                "prompt or no answer"
            )
        logger.info("%s", first_row(encoder, rows[0]))
        logger.log(
            level_of(num_long + num_empty, len(sequences)),
            "%s: %s, %d sequences, %d left out: %d longer than max_seqlen=%d (the longest has %d tokens), "
            "%d without prompt or answer",
            source.path, sample_text(len(examples), len(every), "rows"), len(rows), num_long + num_empty, num_long,
            max_seqlen, max(lens), num_empty,
        )  # fmt: skip
        checksum = checksum_of((examples[row.row] for row in rows), encoder.checksum)
        super().__init__(rows, checksum=checksum, seed=seed, shuffle=shuffle, share=len(examples) / len(every))

    def num_tokens(self, item: MaskedSequence) -> int:
        """Return the length of a row, answer included."""
        return len(item.token_ids)

    def pack(self, items: Sequence[MaskedSequence]) -> PackedBatch:
        """Lay rows end to end."""
        return pack_sequences(items)
