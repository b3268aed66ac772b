"""Prompts with answers as batches: for supervised fine-tuning, and as demonstrations beside rollouts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.data.epochs import EpochBatches, pack_sequences
from mcore_adapter.data.batch import PackedBatch
from rollout.data.encoder import Encoder
from rollout.data.examples import MaskedSequence, encode_examples, first_row
from rollout.data.left_out import evenly_spaced, level_of, sample_text
from rollout.data.rows import DatasetError, checksum_of, read_examples
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


class Demonstrations:
    """A batch of `per_step` rows for every step."""

    def __init__(self, rows: AnswerDataset, per_step: int) -> None:
        """Raises DatasetError where there are fewer rows than a step needs."""
        if len(rows) < per_step:
            raise DatasetError(
                f"demonstrations.path has {len(rows)} rows, and a step takes {per_step}: add rows, or lower "
                "demonstrations.share"
            )
        self._rows, self._per_step = rows, per_step

    def of_step(self, step: int) -> PackedBatch:
        """Return the demonstrations of a step, counted from 0."""
        epoch, within = divmod(step, len(self._rows) // self._per_step)
        return self._rows.batch(epoch + 1, within + 1, self._per_step)

    def state_dict(self) -> dict[str, int]:
        """Return what identifies the rows and their order."""
        return {**self._rows.state_dict(), "per_step": self._per_step}

    def check_continues(self, state: Any) -> None:
        """Raise DatasetError unless the run that wrote `state` visits the same rows in the same order."""
        self._rows.check_continues(state)
        if state["per_step"] != self._per_step:
            raise DatasetError(
                f"the checkpoint has {state['per_step']} demonstrations a step, this run {self._per_step}: restore "
                "demonstrations.share, or allow the change with recover_ignore_changes=true"
            )
