"""Prompts in the order in which they are trained: the first stage of the rollout pipeline.

Invariant: the stream is a pure function of (rows, seed, shuffle): position k is prompt `order(epoch)[k % n]` of epoch
k // n, so any position can be drawn again after a restart.

Prompts that are left out because of their length are counted and reported in one form by a run and by a dry run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rollout.data.encoder import Encoder, PromptFormat
from rollout.data.rows import Row, by_column, checksum_of, identify, scan_rows
from rollout.data.source import DatasetError, DataSource, as_source
from rollout.types import Prompt

if TYPE_CHECKING:  # a --dry-run reads this file, and needs no numpy
    import numpy as np

logger = logging.getLogger(__name__)

T = TypeVar("T")

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
        import numpy as np

        if epoch not in self._orders:
            while len(self._orders) >= 2:
                del self._orders[min(self._orders)]
            n = len(self.prompts)
            self._orders[epoch] = shuffled(n, seed=self._seed, epoch=epoch) if self._shuffle else np.arange(n)
        return self._orders[epoch]


def shuffled(num_prompts: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the prompts in a shuffled epoch of a run with this seed: [num_prompts] int64."""
    import numpy as np

    return np.random.default_rng([seed, epoch]).permutation(num_prompts)


def check_same_stream(before: Mapping[str, object], now: Mapping[str, object], settings: Mapping[str, str]) -> None:
    """Raise DatasetError where a key of `settings` differs between a checkpoint's state and this run's; the values of
    `settings` are the ones to restore."""
    for key, setting in settings.items():
        if before.get(key) != now[key]:
            raise DatasetError(
                f"the checkpoint's data set has {key}={before.get(key)}, this one {now[key]}: "
                f"restore {setting}, allow the change with recover_ignore_changes=true, "
                "or start with recover_mode=disabled"
            )


def make_prompt(row: Row, text: str, token_ids: list[int], *, index: int) -> Prompt:
    """Return a row as a prompt. A conversation, and the tools of a row, are in its meta for the workflow."""
    import numpy as np

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


_WARN_ABOVE = 0.1
"""Share of the prompts."""
SAMPLE = 20_000
"""Rows that are tokenised without a run, a few seconds of work; of more rows a sample, evenly spaced."""
_START_TOKENS = 2
"""What a tokenizer puts before a text, at most: its beginning-of-sequence token and a space."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """How many prompts of one data set were left out, and why."""

    path: str
    num_rows: int
    """Prompts that were tokenised."""
    num_too_long: int
    num_empty: int
    """Prompts without a token."""
    longest: int
    """Tokens of the longest prompt."""
    max_prompt_len: int
    all_rows: int
    """Prompts of the data set; more than num_rows where a sample was tokenised."""

    @property
    def num_left_out(self) -> int:
        return self.num_too_long + self.num_empty

    def report(self, log: logging.Logger) -> None:
        """Log one line if any prompt was left out: a warning if more than a tenth was."""
        if self.num_left_out == 0:
            return
        of = sample_text(self.num_rows, self.all_rows, "prompts")
        why = []
        if self.num_too_long:
            why.append(
                f"{self.num_too_long} with more than dataset.max_prompt_len={self.max_prompt_len} tokens "
                f"(the longest has {self.longest})"
            )
        if self.num_empty:
            why.append(f"{self.num_empty} without a token")
        log.log(
            level_of(self.num_left_out, self.num_rows),
            "%s: %d of %s are left out: %s", self.path, self.num_left_out, of, ", ".join(why),
        )  # fmt: skip


def level_of(num_left_out: int, num_rows: int) -> int:
    """Return the level of the log line about rows that were left out."""
    return logging.WARNING if num_left_out > _WARN_ABOVE * num_rows else logging.INFO


def evenly_spaced(rows: Sequence[T], at_most: int | None) -> Sequence[T]:
    """Return a sample of at most this many rows; None: all rows."""
    return rows if at_most is None else rows[:: max(1, -(-len(rows) // at_most))]


def sample_text(num_rows: int, all_rows: int, what: str) -> str:
    """Return how many rows were tokenised, in words, and of how many."""
    of = f"{num_rows} {what}"
    return f"a sample of {of} (the data set has {all_rows})" if all_rows > num_rows else of


def count_left_out(path: str, lengths: Sequence[int], *, max_prompt_len: int, all_rows: int | None = None) -> LeftOut:
    """Count the prompts of these lengths, in tokens, that are left out. Raises DatasetError where all are."""
    fits = sum(0 < length <= max_prompt_len for length in lengths)
    if not fits:
        raise DatasetError(
            f"{path}: max_prompt_len={max_prompt_len} leaves none of {len(lengths)} prompts; the shortest has "
            f"{min(lengths)} tokens: raise dataset.max_prompt_len to at least that"
        )
    too_long = sum(length > max_prompt_len for length in lengths)
    return LeftOut(
        path=path,
        num_rows=len(lengths),
        num_too_long=too_long,
        num_empty=len(lengths) - fits - too_long,
        longest=max(lengths),
        max_prompt_len=max_prompt_len,
        all_rows=len(lengths) if all_rows is None else all_rows,
    )


def check_lengths(
    path: str, rows: Sequence[Row], *, model: Path, prompt_format: PromptFormat, max_prompt_len: int
) -> None:
    """Report what a run with the tokenizer of the folder `model` would leave out, before it starts.

    Prompts are tokenised, which loads transformers, unless their size in bytes shows that all of them fit. Raises
    DatasetError as a run does: where no prompt fits, or tokenizer or template cannot take the prompts."""
    if num_surely_fitting(rows, model=model, prompt_format=prompt_format, max_prompt_len=max_prompt_len) == len(rows):
        return
    from rollout.data.tokenizer import load_tokenizer

    encoder = Encoder(load_tokenizer(model), prompt_format, folder=model)
    sample = evenly_spaced(rows, SAMPLE)
    if len(sample) < len(rows):
        logger.info("%s: tokenising %d of %d prompts to measure them", path, len(sample), len(rows))
    lengths = [len(token_ids) for _, token_ids in encoder.encode(sample)]
    if len(sample) < len(rows) and not any(0 < length <= max_prompt_len for length in lengths):
        sample, lengths = rows, [len(token_ids) for _, token_ids in encoder.encode(rows)]
    count_left_out(path, lengths, max_prompt_len=max_prompt_len, all_rows=len(rows)).report(logger)


def num_surely_fitting(rows: Sequence[Row], *, model: Path, prompt_format: PromptFormat, max_prompt_len: int) -> int:
    """Return how many prompts fit by their size in bytes; others fit or not, which only their tokens show. A chat
    template may put anything around a prompt: none fits for sure."""
    if prompt_format.template is None and has_chat_template(prompt_format, model):
        return 0
    room = max_prompt_len - len((prompt_format.template or "").encode()) - _START_TOKENS
    plain = (row for row in rows if not (row.messages or row.tools))
    return sum(len(row.prompt.encode(errors="replace")) <= room for row in plain)  # at most one token a byte


def has_chat_template(prompt_format: PromptFormat, model: Path) -> bool:
    """Return whether prompts of the model in this folder have a chat template, prompt_format's or its own."""
    if prompt_format.chat_template is not None or (model / "chat_template.jinja").is_file():
        return True
    config = model / "tokenizer_config.json"
    return config.is_file() and b'"chat_template"' in config.read_bytes()
