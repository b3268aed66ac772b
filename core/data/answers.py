"""Examples of supervised fine-tuning: read, tokenised, and cut into packed batches.

Invariant: only tokens of the assistant (end tokens included) are trained on. Order of the rows: core/data/epochs.py.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from core.data.epochs import EpochBatches
from mcore_adapter.data.batch import PackedBatch
from rollout.data.encoder import Encoder
from rollout.data.examples import MaskedSequence, encode_examples
from rollout.data.left_out import level_of
from rollout.data.rows import read_examples
from rollout.data.source import DatasetError, DataSource, as_source

logger = logging.getLogger(__name__)


class AnswerDataset(EpochBatches[MaskedSequence]):
    """Tokenised sequences with the tokens to train on."""

    COUNT = "num_rows"

    def __init__(
        self, source: str | Path | DataSource, encoder: Encoder, *, max_seqlen: int, seed: int, shuffle: bool
    ) -> None:
        """Read and tokenise. Raises DatasetError for rows that cannot be used, and where all are too long."""
        source = as_source(source)
        examples = read_examples(source)
        sequences = encode_examples(encoder, examples)
        rows = [s for s in sequences if 0 < sum(s.loss_mask) < len(s.token_ids) <= max_seqlen]
        checksum = 0
        for row in rows:
            checksum = zlib.crc32(np.array(row.token_ids, np.int64).tobytes(), checksum)
            checksum = zlib.crc32(np.array(row.loss_mask).tobytes(), checksum)
        if not rows:
            shortest = min(len(s.token_ids) for s in sequences)
            raise DatasetError(
                f"{source.path}: none of {len(sequences)} rows has at most dataset.max_seqlen={max_seqlen} tokens; the "
                f"shortest has {shortest}"
            )
        logger.log(
            level_of(len(sequences) - len(rows), len(sequences)),
            "%s: %d rows, %d sequences, %d left out: longer than max_seqlen=%d, or without prompt or answer",
            source.path, len(examples), len(rows), len(sequences) - len(rows), max_seqlen,
        )  # fmt: skip
        super().__init__(rows, checksum=checksum, seed=seed, shuffle=shuffle)

    def num_tokens(self, item: MaskedSequence) -> int:
        """Return the length of a row, answer included."""
        return len(item.token_ids)

    def pack(self, items: Sequence[MaskedSequence]) -> PackedBatch:
        """Lay rows end to end."""
        lens = torch.tensor([0] + [len(row.token_ids) for row in items])
        return PackedBatch(
            token_ids=torch.tensor([token for row in items for token in row.token_ids]),
            cu_seqlens=lens.cumsum(0),
            loss_mask=torch.tensor([trained for row in items for trained in row.loss_mask]),
        )
