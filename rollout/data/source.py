"""Where the rows of a data set are and how its columns are called: what training, fine-tuning and evaluation share.

Standard library only. A source is made from the configuration or a command line and is sent to other processes.

Names of columns are compared without case, blanks, dashes and underscores: "Correct Answer" is correct_answer. Of one
set of column names there is one answer, whatever the rows hold, so that all rows of a file are read alike.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Literal

from config_schema import did_you_mean
from model_specs.untrusted import parse_json


def printable(text: str) -> str:
    """Return a text for a terminal, without its control codes."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class DatasetError(ValueError):
    """A data set that cannot be used; the message names the file, the row where there is one, and the way out."""

    def __init__(self, message: str, *, setting: str = "") -> None:
        """`setting`: the setting of the data set that is wrong, such as prompt_field; "model": the folder
        of the model; empty: the data itself."""
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
    processors: tuple[str, ...] = ()
    """Import paths of functions that change the rows (rollout/data/rows.py)."""

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


PROMPTS = ("prompt", "problem", "question", "instruction", "query", "input")
"""Names of a question's column, the first that there is counts."""
_CONVERSATIONS = ("messages", "conversations", "conversation")
_RESULTS = (
    "solutions", "finalanswer", "answer", "target", "golden", "gold", "correct", "correctanswer", "answerkey",
    "groundtruth", "rewardmodel.groundtruth", "label", "output", "response", "completion", "solution", "answers",
)  # fmt: skip
"""Names of what a completion is compared with."""
_FULL_ANSWERS = (
    "completion", "response", "output", "solution", "answer", "target", "solutions", "rationale", "finalanswer",
    "golden", "gold", "correct", "correctanswer", "answerkey", "groundtruth", "label", "answers",
)  # fmt: skip
"""Names of what fine-tuning trains on: where there are several, the answer in full."""
_CHOICES = ("choices", "options")
_TOOLS = ("tools", "functions")
_IDS = ("queryid", "uniqueid", "id", "uuid", "idx")
_LETTERED = re.compile(r"(?:option|choice|op)?([a-j])")
_MIN_LETTERS = 3
"""Columns a and b alone are no options."""
_WRONG = re.compile(r"(?:incorrect|wrong)answer(\d)")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of one kind of row, by what they hold."""

    prompt: tuple[str, ...] = ()
    """Parts of the question, in order."""
    messages: str | None = None
    answers: tuple[str, ...] = ()
    """What a completion is compared with, or what fine-tuning trains on: the first one that a row fills in."""
    choices: tuple[str, ...] = ()
    """One column with all the options, or a column for each."""
    system: str | None = None
    """The system message of a conversation without one."""
    tools: str | None = None
    query_id: str | None = None
    task: str | None = None

    @cached_property
    def used(self) -> frozenset[str]:
        """Names of all columns that have a meaning; of the answers only the first."""
        single = (self.messages, self.system, self.tools, self.query_id, self.task)
        names = (*self.prompt, *self.answers[:1], *self.choices, *single)
        return frozenset(name.partition(".")[0] for name in names if name is not None)

    def __str__(self) -> str:
        parts = {
            "prompt": "+".join(self.prompt), "messages": self.messages, "answer": self.answers[:1] and self.answers[0],
            "choices": ", ".join(self.choices), "system": self.system, "tools": self.tools, "id": self.query_id,
        }  # fmt: skip
        return "; ".join(f"{role} from {name!r}" for role, name in parts.items() if name)


def find_columns(names: Sequence[str], fields: Fields, hints: Fields, *, in_full: bool) -> Columns:
    """Return the columns of rows with these names. `fields` must be there, `hints` count where they are.

    in_full: the answer is to be trained on, not to be compared with. Raises ValueError where there is no prompt, and
    DatasetError where a column of `fields` is not there.
    """
    for role, name in fields.given.items():
        if name.partition(".")[0] not in names and name not in names:
            message = f"{role}_field={name!r} is not among the columns {sorted(names)}{did_you_mean(name, names)}"
            raise DatasetError(message, setting=f"{role}_field")
    given = {role: name for role, name in hints.given.items() if name in names} | fields.given
    plain = {_plain(name): name for name in reversed(names)}
    lettered = _lettered(names) if "choices" not in given else ()
    answer = given.get("answer")
    answers = (answer,) if answer is not None else _all_of(plain, _FULL_ANSWERS if in_full else _RESULTS)
    messages = given.get("messages") or (_first(plain, _CONVERSATIONS) if "prompt" not in given else None)
    prompt = (given["prompt"],) if "prompt" in given else _prompt(plain)
    if not prompt and messages is None:
        raise ValueError(
            f"no prompt among the columns {sorted(names)}: name it with prompt_field, or messages_field for a "
            f"conversation; detected are {', '.join(PROMPTS)}, Body + Question, {' and '.join(_CONVERSATIONS)}"
        )
    choices = (given["choices"],) if "choices" in given else (_first(plain, _CHOICES),)
    return Columns(
        prompt=prompt,
        messages=messages,
        answers=answers,
        choices=lettered or tuple(name for name in choices if name is not None),
        system=_first(plain, ("system",)) if messages is not None else None,
        tools=given.get("tools") or _first(plain, _TOOLS),
        query_id=_first(plain, _IDS),
        task=_first(plain, ("task",)),
    )


def value_of(record: Mapping[str, object], name: str) -> object:
    """Return the value of a column, or of a key of the dictionary in it: reward_model.ground_truth. None: not there."""
    if name in record:
        return record[name]
    head, dot, rest = name.partition(".")
    inner = record.get(head) if dot else None
    if isinstance(inner, str):
        inner = parsed(inner)
    return value_of(inner, rest) if isinstance(inner, Mapping) else None


def parsed(text: str) -> object:
    """Return the list or dictionary that a text holds as json, as csv files have them; else the text itself."""
    if text[:1] in ("[", "{"):
        try:
            return parse_json(text)
        except ValueError:
            return text
    return text


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _first(plain: Mapping[str, str], wanted: Iterable[str]) -> str | None:
    return next(iter(_all_of(plain, wanted)), None)


def _all_of(plain: Mapping[str, str], wanted: Iterable[str]) -> tuple[str, ...]:
    """Return the columns with these plain names, in the order wanted; "a.b" is a key of the dictionary in a."""
    found = []
    for name in wanted:
        head, dot, rest = name.partition(".")
        if head in plain:
            found.append(plain[head] + (f".{_INNER.get(rest, rest)}" if dot else ""))
    return tuple(found)


_INNER = {"groundtruth": "ground_truth"}


def _prompt(plain: Mapping[str, str]) -> tuple[str, ...]:
    """Return the parts of a question: Body + Question of word problems, context + question, instruction + input."""
    for before, name in (("body", "question"), ("context", "question"), ("instruction", "input")):
        if before in plain and name in plain and "prompt" not in plain and "problem" not in plain:
            return plain[before], plain[name]
    first = _first(plain, PROMPTS)
    return () if first is None else (first,)


def _lettered(names: Sequence[str]) -> tuple[str, ...]:
    """Return columns that hold an option each: A, B, C, D; option_a ...; Correct Answer, Incorrect Answer 1 ..."""
    by_letter = {m[1]: name for name in names if (m := _LETTERED.fullmatch(_plain(name)))}
    letters = "abcdefghij"[: len(by_letter)]
    if len(by_letter) >= _MIN_LETTERS and all(letter in by_letter for letter in letters):
        return tuple(by_letter[letter] for letter in letters)
    wrong = sorted((m[1], name) for name in names if (m := _WRONG.fullmatch(_plain(name))))
    right = next((name for name in names if _plain(name) == "correctanswer"), None)
    return (right, *(name for _, name in wrong)) if wrong and right is not None else ()
