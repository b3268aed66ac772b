"""Preference pairs as users have them: rows of a prompt with a chosen and a rejected answer. Standard library only.

Answers are texts, or conversations as Hugging Face preference sets have them, whose common beginning is the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.data.answers import text_of
from rollout.data.messages import Messages, is_conversation, read_messages
from rollout.data.readers import read_records
from rollout.data.source import DatasetError, DataSource, as_source


@dataclass(frozen=True, kw_only=True)
class PreferenceFields:
    """Names of the columns of preference pairs."""

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"


@dataclass(frozen=True, kw_only=True)
class Preference:
    """One pair: all three are texts, or all three are lists of messages."""

    place: str
    """File and line."""
    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages


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
    return Preference(
        place=place,
        prompt=_text(record, fields.prompt, "prompt"),
        chosen=_text(record, fields.chosen, "chosen"),
        rejected=_text(record, fields.rejected, "rejected"),
    )


def _text(record: Mapping[str, Any], name: str, role: str) -> str:
    try:
        return text_of(record.get(name), name)
    except ValueError as error:
        raise ValueError(f"{error}; set dataset.{role}_field to its column") from error


def _conversations(prompt: Any, chosen: Messages, rejected: Messages, place: str) -> Preference:
    """Divide two conversations into what they share, with `prompt` before it, and the rest of each."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared and isinstance(prompt, str) and prompt.strip():
        before: Messages = ({"role": "user", "content": prompt},)
    elif not shared and isinstance(prompt, tuple):
        before = prompt
    else:
        before = chosen[:shared]
    if not before:
        raise ValueError("the two conversations share no beginning, and there is no prompt")
    return Preference(place=place, prompt=before, chosen=chosen[shared:], rejected=rejected[shared:])
