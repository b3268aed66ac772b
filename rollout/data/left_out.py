"""Prompts that a run leaves out because of their length: counted and reported in one form by a run and by a dry run.

Loads no heavy library unless prompts have to be tokenised to know.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rollout.data.encoder import Encoder, PromptFormat
from rollout.data.rows import Row
from rollout.data.source import DatasetError

logger = logging.getLogger(__name__)

T = TypeVar("T")

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
