"""Examples of supervised fine-tuning: read, tokenised, and cut into packed batches.

Invariant: only tokens of the assistant (end tokens included) are trained on; epoch e visits the rows in an order
that is a function of (seed, e) alone.
"""

from __future__ import annotations

import logging
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_adapter.data.batch import PackedBatch
from rollout.data.encoder import Encoder
from rollout.data.examples import MaskedSequence, encode_examples
from rollout.data.prompts import check_same_stream
from rollout.data.rows import read_examples
from rollout.data.source import DatasetError, DataSource, as_source

logger = logging.getLogger(__name__)


class AnswerDataset:
    """Tokenised sequences with the tokens to train on."""

    def __init__(
        self, source: str | Path | DataSource, encoder: Encoder, *, max_seqlen: int, seed: int, shuffle: bool
    ) -> None:
        """Read and tokenise. Raises DatasetError for rows that cannot be used, and where all are too long."""
        source = as_source(source)
        examples = read_examples(source)
        sequences = encode_examples(encoder, examples)
        self._rows = [s for s in sequences if sum(s.loss_mask) < len(s.token_ids) <= max_seqlen]
        self._checksum = 0
        for row in self._rows:
            self._checksum = zlib.crc32(np.array(row.token_ids, np.int64).tobytes(), self._checksum)
            self._checksum = zlib.crc32(np.array(row.loss_mask).tobytes(), self._checksum)
        if not self._rows:
            shortest = min(len(s.token_ids) for s in sequences)
            raise DatasetError(
                f"{source.path}: none of {len(sequences)} rows has at most dataset.max_seqlen={max_seqlen} tokens; the "
                f"shortest has {shortest}"
            )
        logger.info(
            "%s: %d rows, %d sequences, %d longer than max_seqlen=%d", source.path, len(examples), len(self),
            len(sequences) - len(self), max_seqlen,
        )  # fmt: skip
        self._seed, self._shuffle = seed, shuffle

    def __len__(self) -> int:
        return len(self._rows)

    def state_dict(self) -> dict[str, int]:
        """Return what identifies the rows and their order."""
        return {"num_rows": len(self), "checksum": self._checksum, "seed": self._seed, "shuffle": self._shuffle}

    def check_continues(self, state: Any) -> None:
        """Raise DatasetError unless the run that wrote `state` visits the same rows in the same order."""
        settings = {
            "num_rows": "dataset.train_path or max_seqlen",
            "checksum": "dataset.train_path",
            "seed": "seed",
            "shuffle": "shuffle_dataset",
        }
        check_same_stream(state, self.state_dict(), settings)

    @property
    def mean_tokens(self) -> float:
        """Mean length of a row, answer included."""
        return float(np.mean([len(row.token_ids) for row in self._rows]))

    def batch(self, epoch: int, epoch_step: int, batch_size: int) -> PackedBatch:
        """Return batch `epoch_step` (from 1) of `epoch` (from 1); the last one of an epoch may be smaller."""
        order = np.arange(len(self))
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self))
        return self._pack([self._rows[i] for i in order[(epoch_step - 1) * batch_size : epoch_step * batch_size]])

    def in_order(self, batch_size: int) -> list[PackedBatch]:
        """Return every row once, as they stand in the file."""
        return [self._pack(self._rows[i : i + batch_size]) for i in range(0, len(self), batch_size)]

    def _pack(self, rows: list[MaskedSequence]) -> PackedBatch:
        lens = torch.tensor([0] + [len(row.token_ids) for row in rows])
        return PackedBatch(
            token_ids=torch.tensor([token for row in rows for token in row.token_ids]),
            cu_seqlens=lens.cumsum(0),
            loss_mask=torch.tensor([trained for row in rows for trained in row.loss_mask]),
        )
