"""Prompts in the order in which they are trained: the first stage of the rollout pipeline.

Invariant: the stream is a pure function of (rows, seed, shuffle): position k is prompt `order(epoch)[k % n]` of epoch
k // n, so any position can be drawn again after a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from rollout.data.encoder import Encoder
from rollout.data.left_out import LeftOut, count_left_out
from rollout.data.rows import Row, by_column, checksum_of, identify, scan_rows
from rollout.data.source import DatasetError, DataSource, as_source
from rollout.types import Prompt

logger = logging.getLogger(__name__)

_SHOWN_CHARS = 2000


class PromptDataset:
    """Tokenised prompts, by default in a new, seeded order every epoch."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool = True,
        left_out: LeftOut | None = None,
        identity: Mapping[str, int] | None = None,
    ) -> None:
        """`prompts[i].index` must be i. Of a data set that was read: `left_out` is what is not among them, `identity`
        what identifies its rows and their template. Raises DatasetError when there is no prompt."""
        if not prompts:
            raise DatasetError("a data set needs at least one prompt")
        self.prompts = tuple(prompts)
        self.left_out = left_out
        self._identity = dict(identity or {"checksum": 0})
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[int, np.ndarray] = {}

    @classmethod
    def load(
        cls,
        source: str | Path | DataSource,
        encoder: Encoder,
        *,
        max_prompt_len: int,
        seed: int,
        shuffle: bool = True,
        solved: bool = True,
        column: str = "",
    ) -> PromptDataset:
        """Read a data set (see scan_rows, also for `solved`) and tokenise every prompt.

        Prompts of more than `max_prompt_len` tokens are left out and counted. `column`: visit the rows by its values,
        the lowest first, in place of the order of the file. Raises DatasetError when the data set cannot be used, and
        when every prompt is too long.
        """
        source = as_source(source)
        rows = scan_rows(source, solved=solved)
        if column:
            rows = by_column(rows, column, source.path)
        encoded = encoder.encode(rows)
        kept = [(row, *of) for row, of in zip(rows, encoded, strict=True) if 0 < len(of[1]) <= max_prompt_len]
        prompts = [make_prompt(*of, index=index) for index, of in enumerate(kept)]
        lengths = [len(token_ids) for _, token_ids in encoded]
        left_out = count_left_out(source.path, lengths, max_prompt_len=max_prompt_len)
        logger.info(
            "%s: %d prompts, %d left out (empty, or longer than max_prompt_len=%d)",
            source.path, len(prompts), left_out.num_left_out, max_prompt_len,
        )  # fmt: skip
        checksum = checksum_of((row for row, *_ in kept), encoder.checksum)
        identity = {"checksum": checksum, **identify(rows)}
        return cls(prompts, seed=seed, shuffle=shuffle, left_out=left_out, identity=identity)

    def __len__(self) -> int:
        """Return the number of prompts per epoch."""
        return len(self.prompts)

    def at(self, position: int) -> Prompt:
        """Return the prompt at `position` of the endless stream, `epoch` filled in."""
        epoch, offset = divmod(position, len(self.prompts))
        prompt = self.prompts[self._order(epoch)[offset]]
        return replace(prompt, epoch=epoch) if epoch else prompt

    def find(self, query_id: str, epoch: int) -> Prompt:
        """Return a row by its query_id, as of an epoch. Raises KeyError."""
        prompt = self.prompts[self._index_of[query_id]]
        return replace(prompt, epoch=epoch) if epoch else prompt

    @cached_property
    def _index_of(self) -> dict[str, int]:
        return {prompt.query_id: index for index, prompt in enumerate(self.prompts)}

    def identity(self) -> dict[str, int]:
        """Return what identifies this stream."""
        return {"seed": self._seed, "shuffle": self._shuffle, "num_prompts": len(self), **self._identity}

    def check_same(self, state: Mapping[str, int]) -> None:
        """Raise DatasetError when rows or seed are not the ones of a run whose identity() is in `state`."""
        settings = {
            "num_prompts": "dataset.path or max_prompt_len",
            "checksum": "the rows of dataset.path and the keys of prompt",
            "seed": "seed",
            "shuffle": "the order of the prompts",
        }
        check_same_stream(state, self.identity(), settings)

    def _order(self, epoch: int) -> np.ndarray:
        """Return the order of the rows in `epoch`: [n]. Two epochs are kept, since both are drawn from at an epoch's
        end."""
        if epoch not in self._orders:
            while len(self._orders) >= 2:
                del self._orders[min(self._orders)]
            n = len(self.prompts)
            shuffled = np.random.default_rng([self._seed, epoch]).permutation
            self._orders[epoch] = shuffled(n) if self._shuffle else np.arange(n)
        return self._orders[epoch]


def check_same_stream(before: Mapping[str, object], now: Mapping[str, object], settings: Mapping[str, str]) -> None:
    """Raise DatasetError where a key of `settings` differs between a checkpoint's state and this run's; the values of
    `settings` are the ones to restore."""
    for key, setting in settings.items():
        if before[key] != now[key]:
            raise DatasetError(
                f"the checkpoint's data set has {key}={before[key]}, this one {now[key]}: "
                f"restore {setting}, allow the change with recover_ignore_changes=true, "
                "or start with recover_mode=disabled"
            )


def make_prompt(row: Row, text: str, token_ids: list[int], *, index: int) -> Prompt:
    """Return a row as a prompt. A conversation, and the tools of a row, are in its meta for the workflow."""
    chat = {"messages": row.messages, "tools": row.tools}
    return Prompt(
        query_id=row.query_id,
        index=index,
        task=row.task,
        text=text,
        question="" if row.messages is not None or row.prompt == text else row.prompt,
        token_ids=np.asarray(token_ids, dtype=np.int32),
        solutions=row.solutions,
        meta={**row.meta, **{name: value for name, value in chat.items() if value is not None}},
    )


def first_prompt(prompt: Prompt, reward: str) -> str:
    """Return a prompt as the model gets it, and how its answer is judged, for the log."""
    text = prompt.text
    if len(text) > _SHOWN_CHARS:
        text = f"{text[: _SHOWN_CHARS // 2]} [...] {text[-_SHOWN_CHARS // 2 :]}"
    solutions = " or ".join(prompt.solutions)
    judged = f"right is {solutions}" if reward == "math" else f"its solutions are {solutions or 'none'}"
    return f"First prompt ({len(prompt.token_ids)} tokens): {text!r}; judged by reward.function={reward}: {judged}"
