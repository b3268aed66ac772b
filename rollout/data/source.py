"""Where the rows of a data set are and how its columns are called: what training, fine-tuning and evaluation share.

Standard library only. A source is made from the configuration or a command line and is sent to other processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Literal


def printable(text: str) -> str:
    """Return a text for a terminal, without its control codes."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class DatasetError(ValueError):
    """A data set that cannot be used; the message names the file, the row where there is one, and the way out."""

    def __init__(self, message: str, *, setting: str = "") -> None:
        """`setting`: the setting of the data set that is wrong, such as prompt_field; empty: the data itself."""
        super().__init__(printable(message))
        self.setting = setting


class NoneLeftError(DatasetError):
    """A data set of which a run leaves out every row."""


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Names of the columns of a data set by what they hold; None: detected. A dot goes into a dictionary, as in
    reward_model.ground_truth."""

    prompt: str | None = None
    answer: str | None = None
    messages: str | None = None
    """A conversation: list of {role, content}."""
    choices: str | None = None
    """Options of a multiple choice question."""
    tools: str | None = None
    """Functions that the chat template describes: list of JSON schemas."""

    @property
    def given(self) -> dict[str, str]:
        """Role -> name, of the columns that have one."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {role: name for role, name in named.items() if name is not None}


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A data set: a file, a glob, a folder, or the id of a Hugging Face data set."""

    path: str
    split: str | None = None
    """Of a folder or a Hugging Face data set. None: `prefer`, or the only one."""
    subset: str | None = None
    """Of a folder or a Hugging Face data set, which calls it configuration."""
    fields: Fields = Fields()
    """Columns that must exist."""
    hints: Fields = Fields()
    """Columns to use where they exist and `fields` names none."""
    prefer: Literal["train", "validation", "test"] = "train"
    """The split to read where none is given."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits to use where none is given, the best first; the only one there is counts too."""
        return {"train": ("train",), "test": ("test", "validation"), "validation": ("validation", "test")}[self.prefer]

    @cached_property
    def name(self) -> str:
        """Short name, for metrics and files: the file's or folder's, or the folder's where the file is called after a
        split (aime24/test.jsonl)."""
        path = Path(self.path)
        stem = path.name.partition(".")[0] if not os.path.isdir(path) else path.name
        if self.subset is not None:
            return f"{stem}-{self.subset}"
        return path.parent.name if stem in SPLIT_NAMES and path.parent.name else stem


SPLIT_NAMES: Mapping[str, str] = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test",
}  # fmt: skip
"""Name of a split in file names -> the split's name."""


def as_source(source: str | Path | DataSource) -> DataSource:
    """Return a path as a source whose columns are detected."""
    return source if isinstance(source, DataSource) else DataSource(path=str(source))
