"""The data sets of sft, dpo and demonstrations: rows of a file, tokenised, in the order of each epoch, as packed
batches. Those of sft and dpo are opened in one way by a run, and by a dry run, which measures them.

Invariants: epoch e visits the items in an order that is a function of (seed, e) alone. Only tokens of the two answers
of a pair (end-of-sequence included) are trained on; the sequences of a pair are adjacent, the chosen one first.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from core.runs.checkpoints import State
from mcore_adapter.data.batch import PAIR, PackedBatch
from rollout.data.encoder import Encoder, MaskedSequence, encode_examples, first_row
from rollout.data.prompts import SAMPLE, check_same_stream, evenly_spaced, level_of, sample_text
from rollout.data.rows import Preference, PreferenceFields, checksum_of, read_examples, read_preferences
from rollout.data.source import DatasetError, DataSource, NoneLeftError, as_source

if TYPE_CHECKING:
    from core.config.experiments import DPOConfig, SFTConfig

logger = logging.getLogger(__name__)


Item = TypeVar("Item")


class EpochBatches(ABC, Generic[Item]):
    """Tokenised items that a run visits epoch by epoch."""

    COUNT: ClassVar[str]
    """Name of the number of items in a state."""
    ITEMS: ClassVar[str]
    """What the items are, for messages."""

    def __init__(self, items: Sequence[Item], *, checksum: int, seed: int, shuffle: bool, share: float = 1.0) -> None:
        """`checksum`: of the rows, and of what they are rendered with. `share`: of the rows that were tokenised; less
        than 1 only without a run."""
        self._items, self._checksum, self._seed, self._shuffle = items, checksum, seed, shuffle
        self.share = share

    @abstractmethod
    def pack(self, items: Sequence[Item]) -> PackedBatch:
        """Lay items end to end."""

    @abstractmethod
    def num_tokens(self, item: Item) -> int:
        """Return the tokens of an item, prompts included."""

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._items)

    def state_dict(self) -> dict[str, int]:
        """Return what identifies the items and their order."""
        return {self.COUNT: len(self), "checksum": self._checksum, "seed": self._seed, "shuffle": self._shuffle}

    def check_continues(self, state: State) -> None:
        """Raise DatasetError unless the run that wrote `state` visits the same items in the same order."""
        self.check_same_items(state)
        check_same_stream(state, self.state_dict(), {"seed": "seed", "shuffle": "shuffle_dataset"})

    def check_same_items(self, state: State) -> None:
        """Raise DatasetError unless the run that wrote `state` visits the same items, in whatever order."""
        settings = {
            self.COUNT: "dataset.train_path or max_seqlen",
            "checksum": "the rows of dataset.train_path and the keys of prompt",
        }
        check_same_stream(state, self.state_dict(), settings)

    @property
    def mean_tokens(self) -> float:
        """Mean length of an item."""
        return float(np.mean([self.num_tokens(item) for item in self._items]))

    def batch(self, epoch: int, epoch_step: int, batch_size: int) -> PackedBatch:
        """Return batch `epoch_step` (from 1) of `epoch` (from 1), `batch_size` items; the last one of an epoch may be
        smaller."""
        order = np.arange(len(self))
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self))
        return self.pack([self._items[i] for i in order[(epoch_step - 1) * batch_size : epoch_step * batch_size]])

    def in_order(self, batch_size: int) -> list[PackedBatch]:
        """Return every item once, as they stand in the file."""
        return [self.pack(self._items[i : i + batch_size]) for i in range(0, len(self), batch_size)]


def pack_sequences(sequences: Sequence[MaskedSequence]) -> PackedBatch:
    """Lay sequences end to end."""
    lens = torch.tensor([0] + [len(sequence.token_ids) for sequence in sequences])
    return PackedBatch(
        token_ids=torch.tensor([token for sequence in sequences for token in sequence.token_ids]),
        cu_seqlens=lens.cumsum(0),
        loss_mask=torch.tensor([trained for sequence in sequences for trained in sequence.loss_mask]),
    )


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


Rows = AnswerDataset | PreferenceDataset
"""Items of any kind."""


class Demonstrations:
    """A batch of `per_step` rows, or pairs, for every step."""

    def __init__(self, rows: Rows, per_step: int) -> None:
        """Raises DatasetError where there are fewer rows than a step needs."""
        if len(rows) < per_step:
            raise DatasetError(
                f"demonstrations.path has {len(rows)} {rows.ITEMS}, and a step takes {per_step}: add some, or lower "
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

    def check_continues(self, state: State) -> None:
        """Raise DatasetError unless the run that wrote `state` visits the same rows in the same order."""
        self._rows.check_continues(state)
        if state["per_step"] != self._per_step:
            raise DatasetError(
                f"the checkpoint has {state['per_step']} demonstrations a step, this run {self._per_step}: restore "
                "demonstrations.share, or allow the change with recover_ignore_changes=true"
            )


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


class OpenData(Protocol):
    """Opens a data set; with `sample` tokenises only so many rows of it. Raises DatasetError."""

    def __call__(self, source: DataSource, *, sample: int | None = None) -> Rows: ...


def opener(config: SFTConfig | DPOConfig) -> OpenData:
    """Return what opens the data sets of a run. Raises DatasetError where the tokenizer or the chat template cannot be
    read."""
    from rollout.data.tokenizer import load_tokenizer  # imports transformers, which a driver does without

    folder, columns = config.model_folder, config.pair_columns
    encoder = Encoder(load_tokenizer(folder), config.prompt.prompt_format(boxed=False), folder=folder)
    load = AnswerDataset if columns is None else partial(PreferenceDataset, fields=columns)

    def open_one(source: DataSource, *, sample: int | None = None) -> Rows:
        return load(source, encoder, max_seqlen=config.trained_tokens[0], sample=sample, **config.row_order)

    return open_one


def open_sample(open_one: OpenData, source: DataSource) -> Rows:
    """Open a data set without a run: a sample of a large one. Raises DatasetError as a run does."""
    try:
        return open_one(source, sample=SAMPLE)
    except NoneLeftError as error:
        logger.info("%s; reading every row: one that fits may not be in the sample of at most %d", error, SAMPLE)
        return open_one(source)
