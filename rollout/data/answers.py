"""The answer of a row in the forms that data sets have: numbers, texts, options, GSM8K's `#### 42`, `9 (apples)`.

solutions_of() returns what a completion is compared with, full_text() what fine-tuning trains on. Invariant: every
solution of a math problem is in a box, and no chain of thought becomes one.

Options of a multiple choice are a list, a dictionary by letter, {text, label}, one text ("A) 12 B) 24"), or a column
each. The right one is given by a letter, an index from 0, a label, or its text.
"""

import hashlib
import math
import random
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal

from rollout.data.source import parsed

LETTERS = "ABCDEFGHIJ"
_MARKED = re.compile(r"^\s*\(?([A-J])[).:]\s*")
_MARKS = re.compile(r"(?:^|(?<=[\s,;\]]))\(?([A-J])[).:]\s*")
_LETTER = re.compile(r"\(?([A-Ja-j])[).:]?")


def read_options(values: object) -> tuple[list[str], list[str]]:
    """Return (texts, labels) of the options in one column; labels are letters where the row has none.

    Raises ValueError."""
    if isinstance(values, str):
        values = parsed(values)
    if isinstance(values, str):
        texts = _split(values)
        return texts, list(LETTERS[: len(texts)])
    labels: Sequence[object] = LETTERS
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


def right_letter(answer: object, texts: Sequence[str], labels: Sequence[str]) -> str:
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


_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")
_WITH_UNIT = re.compile(r"\s*([-+]?[\d.,/: ]*\d)\s*\(([^()\d]*)\)\s*")
"""ASDiv's `9 (apples)`: the unit is a remark."""
_LONGEST_RESULT = 400
"""In characters; a longer text without a mark is no result but how it was found."""


def boxed(answer: str | int | float) -> str:
    """Return an answer as the tutorial writes it: 43.0 -> `\\boxed{43}`, 1e-3 -> `\\boxed{0.001}`; boxed text stays."""
    text = scalar_text(answer).strip()
    return text if "\\boxed" in text else f"\\boxed{{{text}}}"


def is_marked(answer: object) -> bool:
    """Return whether an answer marks its result as GSM8K does."""
    return isinstance(answer, str) and bool(answer.rpartition("####")[1])


def solutions_of(
    answer: object, column: str | None, *, task: str, needed: bool, columns: Sequence[str]
) -> tuple[str, ...]:
    """Return the solutions in an answer column, in boxes if task is math. Raises ValueError where they are needed and
    there are none."""
    if answer is None and needed and (task != "math" or column is None):
        raise ValueError(
            f"no solution among the columns {sorted(columns)} of task {task!r}, and reward.function=math compares with "
            "it; name the column with answer_field, or write your own reward.function"
        )
    if answer is None and not needed:
        return ()
    column = column or "answer"
    try:
        if isinstance(answer, list | tuple):
            return _listed(answer, column, is_math=task == "math")
        return (_solution(answer, column, is_math=task == "math"),)
    except UnicodeEncodeError:
        raise
    except ValueError:
        if needed:
            raise
        return ()


def _listed(answers: Sequence[object], column: str, *, is_math: bool) -> tuple[str, ...]:
    if not answers:
        raise ValueError(f'"{column}" must hold an answer, found an empty list')
    return tuple(_solution(answer, column, is_math=is_math) for answer in answers)


def _solution(answer: object, column: str, *, is_math: bool) -> str:
    value = scalar(answer, column)
    if not is_math:
        return scalar_text(value)
    text = str(value)
    _, marker, final = text.rpartition("####")
    if marker and final.strip():
        return boxed(_THOUSANDS.sub("", final.strip().splitlines()[0]))  # MetaMathQA goes on with "The answer is: 5"
    if marker:
        raise ValueError(f"\"{column}\" must end in '#### <number>', as GSM8K writes it")
    if match := _WITH_UNIT.fullmatch(text):
        return boxed(match[1])
    must_be_marked(text, column)
    return boxed(value)


def must_be_marked(text: str, column: str) -> None:
    """Raise ValueError for a text that is no result but how it was found, without a box."""
    if "\\boxed" in text:
        return
    if column.lower() == "solution":
        raise ValueError(f'"{column}" has no \\boxed{{...}} and the row has no "answer"')
    if "\n" in text.strip() or "<<" in text or len(text) > _LONGEST_RESULT:
        raise ValueError(
            f'"{column}" is a text of {len(text)} characters without a marked result; it needs "#### <number>" as its '
            "last line, or \\boxed{...}; or name the column of the result with answer_field"
        )


def full_text(answer: object, column: str) -> str:
    """Return the answer to train on; of a list the first. Raises ValueError."""
    if isinstance(answer, list | tuple):
        if not answer or not all(isinstance(a, str | int | float) and not isinstance(a, bool) for a in answer):
            raise ValueError(f'"{column}" must be a list of non-empty strings or numbers, found {_shown(answer)}')
        answer = answer[0]
    return text_of(answer, column) if isinstance(answer, str) else scalar_text(scalar(answer, column))


def scalar(value: object, column: str) -> str | int | float:
    """Return a string that is not blank, or a finite number. Raises ValueError."""
    if isinstance(value, Decimal):
        value = float(value)
    usable = isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip()
    if not usable or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f'"{column}" must be a string or a number, found {_shown(value)}')
    assert isinstance(value, str | int | float), "checked above"
    if isinstance(value, str):
        value.encode()  # see text_of
    return value


def scalar_text(value: str | int | float) -> str:
    """Return 43.0 as "43", 1e-3 as "0.001", text unchanged."""
    if isinstance(value, float):
        value = int(value) if value.is_integer() else f"{Decimal(str(value)):f}"
    return str(value)


def text_of(value: object, column: str) -> str:
    """Return a text that is not blank. Raises ValueError."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f'"{column}" must be a non-empty string, found {_shown(value)}')
    value.encode()  # a lone surrogate is valid json and would fail in the tokenizer, far from its line
    return value


def _shown(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"
