"""Items of a file in the order of each epoch, as packed batches.

Invariant: epoch e visits the items in an order that is a function of (seed, e) alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch

from mcore_adapter.data.batch import PackedBatch
from rollout.data.examples import MaskedSequence
from rollout.data.prompts import check_same_stream

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

    def check_continues(self, state: Any) -> None:
        """Raise DatasetError unless the run that wrote `state` visits the same items in the same order."""
        self.check_same_items(state)
        check_same_stream(state, self.state_dict(), {"seed": "seed", "shuffle": "shuffle_dataset"})

    def check_same_items(self, state: Any) -> None:
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


Rows = EpochBatches[Any]
"""Items of any kind."""


def pack_sequences(sequences: Sequence[MaskedSequence]) -> PackedBatch:
    """Lay sequences end to end."""
    lens = torch.tensor([0] + [len(sequence.token_ids) for sequence in sequences])
    return PackedBatch(
        token_ids=torch.tensor([token for sequence in sequences for token in sequence.token_ids]),
        cu_seqlens=lens.cumsum(0),
        loss_mask=torch.tensor([trained for sequence in sequences for trained in sequence.loss_mask]),
    )
