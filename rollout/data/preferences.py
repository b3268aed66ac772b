"""Preference pairs as users have them: rows of a prompt with a chosen and a rejected answer. Standard library only.

Answers are texts, or conversations as Hugging Face preference sets have them, whose common beginning is the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rollout.data.answers import text_of
from rollout.data.messages import Messages, is_conversation, read_messages
from rollout.data.readers import read_records
from rollout.data.rows import Example
from rollout.data.source import DatasetError, DataSource, as_source

_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")


@dataclass(frozen=True, kw_only=True)
class PreferenceFields:
    """Names of the columns of preference pairs."""

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"


class Preference(NamedTuple):
    """One pair: two answers to one prompt, as rows of fine-tuning."""

    chosen: Example
    rejected: Example


def read_preferences(source: str | Path | DataSource, fields: PreferenceFields) -> list[Preference]:
    """Read every pair of a data set. Raises DatasetError with file and row for a row that is none."""
    pairs = []
    for record in read_records(as_source(source)):
        try:
            pairs.append(_pair(record.values, fields, record.place))
        except (ValueError, TypeError, KeyError) as error:
            raise DatasetError(f"{record.place}: {error}") from error
    return pairs


def _pair(record: Mapping[str, Any], fields: PreferenceFields, place: str) -> Preference:
    for role, name in (("chosen", fields.chosen), ("rejected", fields.rejected)):
        if record.get(name) is None:
            raise ValueError(
                f"no {role} answer under {name!r}, only {sorted(record)}; set dataset.{role}_field to its column"
            )
    chosen, rejected = record[fields.chosen], record[fields.rejected]
    if record.get(fields.prompt) is None:
        chosen, rejected = _dialogue(chosen), _dialogue(rejected)
    if is_conversation(chosen) != is_conversation(rejected):
        raise ValueError(f"{fields.chosen!r} and {fields.rejected!r} must be both texts or both lists of messages")
    if is_conversation(chosen):
        prompt = record.get(fields.prompt)
        return _conversations(
            read_messages(prompt, fields.prompt) if is_conversation(prompt) else prompt,
            read_messages(chosen, fields.chosen),
            read_messages(rejected, fields.rejected),
            place,
        )
    text = _text(record, fields.prompt, "prompt")
    answers = (_text(record, fields.chosen, "chosen"), _text(record, fields.rejected, "rejected"))
    return Preference(*(Example(place=place, prompt=text, answer=answer) for answer in answers))


def _dialogue(text: Any) -> Any:
    """Return the turns of a dialogue in one text, as hh-rlhf has them; anything else unchanged."""
    first, *turns = _SPEAKER.split(text) if isinstance(text, str) else [""]
    if first.strip() or not turns:
        return text
    return [{"role": role, "content": said.strip()} for role, said in zip(turns[::2], turns[1::2], strict=True)]


def _text(record: Mapping[str, Any], name: str, role: str) -> str:
    if name not in record:
        raise ValueError(f"no {role} under {name!r}, only {sorted(record)}; set dataset.{role}_field to its column")
    try:
        return text_of(record[name], name)
    except ValueError as error:
        raise ValueError(f"{error}; set dataset.{role}_field to its column") from error


def _conversations(prompt: Any, chosen: Messages, rejected: Messages, place: str) -> Preference:
    """Return two conversations whose answers begin where they part; `prompt` stands before them if they share
    nothing. Raises ValueError where they do not part at a turn of the assistant."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    before = chosen[:shared]
    if not shared and isinstance(prompt, str) and prompt.strip():
        before = ({"role": "user", "content": prompt},)
    elif not shared and isinstance(prompt, tuple):
        before = prompt
    if not before:
        raise ValueError("the two conversations share no beginning, and there is no prompt")
    answers = (chosen[shared:], rejected[shared:])
    for answer in answers:
        if answer[0]["role"] != "assistant":
            raise ValueError(f"the two conversations part at a turn of {answer[0]['role']!r}, not of the assistant")
    if len(chosen) != len(rejected) and answers[0][0] == answers[1][0]:
        raise ValueError("one of the two conversations is the beginning of the other, so no answer differs")
    return Preference(
        *(Example(place=place, messages=(*before, *answer), num_untrained=len(before)) for answer in answers)
    )
