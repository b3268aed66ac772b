"""Which columns of a row hold what: named in the configuration, or detected by their names.

Names are compared without case, blanks, dashes and underscores: "Correct Answer" is correct_answer. Invariant: of one
set of column names there is one answer, whatever the rows hold, so that all rows of a file are read alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from config_schema.nearest import did_you_mean
from model_specs.untrusted import parse_json
from rollout.data.source import DatasetError, Fields

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


def value_of(record: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of a key of the dictionary in it: reward_model.ground_truth. None: not there."""
    if name in record:
        return record[name]
    head, dot, rest = name.partition(".")
    inner = record.get(head) if dot else None
    if isinstance(inner, str):
        inner = parsed(inner)
    return value_of(inner, rest) if isinstance(inner, Mapping) else None


def parsed(text: str) -> Any:
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
