"""Prompts with answers for supervised fine-tuning: read, tokenised, and cut into packed batches.

Invariant: only answer tokens (end-of-sequence included) are trained on; epoch e visits the rows in an order that is a
function of (seed, e) alone.
"""

from __future__ import annotations

import logging
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_adapter.data.batch import PackedBatch
from rollout.data.prompts import check_same_stream
from rollout.data.rows import DatasetError, read_pairs

logger = logging.getLogger(__name__)


class AnswerDataset:
    """Tokenised prompt-answer sequences."""

    def __init__(self, path: str | Path, tokenizer: Any, *, max_seqlen: int, seed: int, shuffle: bool) -> None:
        pairs = read_pairs(path)
        prompts = tokenizer([p for p, _ in pairs])["input_ids"]
        answers = tokenizer([a for _, a in pairs], add_special_tokens=False)["input_ids"]
        rows = [(p, a + [tokenizer.eos_token_id]) for p, a in zip(prompts, answers, strict=True)]
        kept = [i for i, (p, a) in enumerate(rows) if p and len(p) + len(a) <= max_seqlen]
        self._rows = [rows[i] for i in kept]
        self._checksum = 0
        for prompt, answer in (pairs[i] for i in kept):
            self._checksum = zlib.crc32(f"{prompt}\0{answer}\0".encode(), self._checksum)
        if not self._rows:
            raise DatasetError(f"{path}: none of {len(rows)} rows has at most dataset.max_seqlen={max_seqlen} tokens")
        logger.info("%s: %d rows, %d longer than max_seqlen=%d", path, len(self), len(rows) - len(self), max_seqlen)
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
        return float(np.mean([len(p) + len(a) for p, a in self._rows]))

    def batch(self, epoch: int, epoch_step: int, batch_size: int) -> PackedBatch:
        """Return batch `epoch_step` (from 1) of `epoch` (from 1); the last one of an epoch may be smaller."""
        order = np.arange(len(self))
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self))
        return self._pack([self._rows[i] for i in order[(epoch_step - 1) * batch_size : epoch_step * batch_size]])

    def in_order(self, batch_size: int) -> list[PackedBatch]:
        """Return every row once, as they stand in the file."""
        return [self._pack(self._rows[i : i + batch_size]) for i in range(0, len(self), batch_size)]

    def _pack(self, rows: list[tuple[list[int], list[int]]]) -> PackedBatch:
        lens = torch.tensor([0] + [len(p) + len(a) for p, a in rows])
        return PackedBatch(
            token_ids=torch.tensor([t for p, a in rows for t in p + a]),
            cu_seqlens=lens.cumsum(0),
            loss_mask=torch.tensor([x for p, a in rows for x in [False] * len(p) + [True] * len(a)]),
        )
