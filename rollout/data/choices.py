"""Multiple choice: the options of a row in any published form, the question with its options, and the letter to answer.

Options are a list, a dictionary by letter, {text, label}, one text ("A) 12 B) 24"), or a column each. The answer is a
letter, an index from 0, a label, or the text of an option.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.data.columns import parsed

LETTERS = "ABCDEFGHIJ"
_MARKED = re.compile(r"^\s*\(?([A-J])[).:]\s*")
_MARKS = re.compile(r"(?:^|(?<=[\s,;\]]))\(?([A-J])[).:]\s*")
_LETTER = re.compile(r"\(?([A-Ja-j])[).:]?")


def read_options(values: Any) -> tuple[list[str], list[str]]:
    """Return (texts, labels) of the options in one column; labels are letters where the row has none.

    Raises ValueError."""
    if isinstance(values, str):
        values = parsed(values)
    if isinstance(values, str):
        texts = _split(values)
        return texts, list(LETTERS[: len(texts)])
    labels: Sequence[Any] = LETTERS
    if isinstance(values, Mapping) and "text" in values:
        labels, values = values.get("label") or LETTERS, values["text"]
    elif isinstance(values, Mapping):
        labels, values = list(values), list(values.values())
    elif isinstance(values, list) and values and all(isinstance(v, Mapping) and "text" in v for v in values):
        labels, values = [v.get("label", LETTERS[i]) for i, v in enumerate(values)], [v["text"] for v in values]
    if not isinstance(values, list | tuple) or not 2 <= len(values) <= len(LETTERS):
        raise ValueError(f"options must be a list of 2 to {len(LETTERS)}, found {str(values)[:60]!r}")
    texts = [str(value).strip() for value in values]
    marks = [_MARKED.match(text) for text in texts]
    if [m and m[1] for m in marks] == list(LETTERS[: len(texts)]):
        texts = [_MARKED.sub("", text, count=1) for text in texts]
    return texts, [str(label) for label in labels[: len(texts)]]


def _split(text: str) -> list[str]:
    """Return the options of a text that marks each with its letter: "A) 12 B) 24"."""
    parts = _MARKS.split(text)[1:]
    letters, texts = parts[::2], [part.strip(" \n\t,;[]") for part in parts[1::2]]
    if len(texts) < 2 or letters != list(LETTERS[: len(texts)]):
        raise ValueError(f"options must be a list, or a text such as 'A) 12 B) 24', found {text[:60]!r}")
    return texts


def shuffled(question: str, options: Sequence[str]) -> tuple[list[str], str]:
    """Return options of which the first is right in an order that depends on the question alone, and its letter."""
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    order = random.Random(int.from_bytes(digest, "little")).sample(range(len(options)), len(options))
    return [options[i] for i in order], LETTERS[order.index(0)]


def right_letter(answer: Any, texts: Sequence[str], labels: Sequence[str]) -> str:
    """Return the letter of the right option. Raises ValueError where the answer is none of them."""
    if isinstance(answer, bool) or not isinstance(answer, int | float | str):
        raise ValueError(f"the answer to a multiple choice must be a letter or an index, found {str(answer)[:60]!r}")
    if not isinstance(answer, str):
        if answer not in range(len(texts)):
            raise ValueError(f"the answer {answer} is no index of {len(texts)} options, counted from 0")
        return LETTERS[int(answer)]
    given = answer.strip()
    if given in labels:
        return LETTERS[labels.index(given)]
    if given in texts:
        return LETTERS[texts.index(given)]
    if (match := _LETTER.fullmatch(given)) and LETTERS.index(match[1].upper()) < len(texts):
        return match[1].upper()
    if given.isdigit() and int(given) < len(texts):
        return LETTERS[int(given)]
    raise ValueError(f"the answer {given[:60]!r} is none of the options {', '.join(labels)}: {' | '.join(texts)[:100]}")


def with_options(question: str, texts: Sequence[str]) -> str:
    """Return the question followed by its options, unless it has them, and the request for a letter."""
    lettered = list(zip(LETTERS, texts, strict=False))
    has_options = all(re.search(rf"\(?\b{letter}[).:]\s*{re.escape(text)}", question) for letter, text in lettered)
    options = "" if has_options else "\n\n" + "\n".join(f"{letter}. {text}" for letter, text in lettered)
    return f"{question}{options}\n\nAnswer with the letter of the right option."
