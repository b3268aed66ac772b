"""Preference pairs as users have them: rows of a prompt with a chosen and a rejected answer. Standard library only.

Answers are texts, or conversations as Hugging Face preference sets have them, whose common beginning is the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.data.rows import DatasetError, read_records

Messages = list[dict[str, Any]]


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


def read_preferences(path: str | Path, fields: PreferenceFields) -> list[Preference]:
    """Read every pair of a jsonl file. Raises DatasetError with file and line for a row that is none."""
    pairs = []
    for number, record in read_records(Path(path)):
        place = f"{path}:{number}"
        try:
            pairs.append(_pair(record, fields, place))
        except ValueError as error:
            raise DatasetError(f"{place}: {error}") from error
    if not pairs:
        raise DatasetError(f"{path}: no rows; dpo needs at least one pair")
    return pairs


def _pair(record: Mapping[str, Any], fields: PreferenceFields, place: str) -> Preference:
    for role, name in (("chosen", fields.chosen), ("rejected", fields.rejected)):
        if record.get(name) is None:
            raise ValueError(
                f"no {role} answer under {name!r}, only {sorted(record)}; set dataset.fields.{role} to its column"
            )
    chosen, rejected = record[fields.chosen], record[fields.rejected]
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise ValueError(f"{fields.chosen!r} and {fields.rejected!r} must be both texts or both lists of messages")
    if isinstance(chosen, list):
        return _conversations(record.get(fields.prompt), chosen, rejected, place)
    return Preference(
        place=place,
        prompt=_text(record, fields.prompt, "prompt"),
        chosen=_text(record, fields.chosen, "chosen"),
        rejected=_text(record, fields.rejected, "rejected"),
    )


def _text(record: Mapping[str, Any], name: str, role: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        found = "nothing" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"
        raise ValueError(f"dataset.fields.{role}={name!r} must be a text that is not empty, found {found}")
    value.encode()  # a lone surrogate is valid json and would fail in the tokenizer, far from its line
    return value


def _conversations(prompt: Any, chosen: Messages, rejected: Messages, place: str) -> Preference:
    """Divide two conversations into what they share, with `prompt` before it, and the rest of each."""
    for message in (*chosen, *rejected):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(f"a message must have a role and content, found {str(message)[:60]!r}")
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared and isinstance(prompt, str) and prompt.strip():
        before: Messages = [{"role": "user", "content": prompt}]
    elif not shared and isinstance(prompt, list):
        before = prompt
    else:
        before = list(chosen[:shared])
    if not before:
        raise ValueError("the two conversations share no beginning, and there is no prompt")
    return Preference(place=place, prompt=before, chosen=list(chosen[shared:]), rejected=list(rejected[shared:]))
