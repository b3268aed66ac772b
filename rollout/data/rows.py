"""jsonl rows as users have them, read into one form. Standard library only: a --dry-run checks a data set with it.

Schemas are told apart by their keys: {"prompt", "solutions"} (the tutorial's), {"prompt", "answer"}, {"problem",
"answer"} (MATH, AIME, AMC), {"question", "answer": "... #### n"} (GSM8K) and {"input", "target"} (MAWPS); of any other,
`Fields` names the keys.
Invariant: a `Row` that comes out of here has a prompt, a unique query_id and, for task "math", at least one solution in
a box; whatever cannot be read that way is an error that names file and line.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path

logger = logging.getLogger(__name__)

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")


class DatasetError(ValueError):
    """A data set that cannot be used; the message names the file, the line where there is one, and the way out."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt before tokenisation. `meta` holds the keys of the row that the schema does not use."""

    line: int
    query_id: str
    task: str
    prompt: str
    solutions: tuple[str, ...]
    meta: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Fields:
    """The keys of a row that hold its prompt and its answer."""

    prompt: str
    answer: str


def scan_rows(path: str | Path, fields: Fields | None = None) -> list[Row]:
    """Read and check every row of a jsonl file; blank lines are skipped. A repeated query_id is kept under a new name.
    `fields`: where prompt and answer are; None: detect_fields() of each row.

    Raises DatasetError with file and line for the first row that cannot be used, and for a missing or empty file.
    """
    path = Path(path)
    rows = _with_unique_ids(list(_read(path, fields)), path)
    if not rows:
        raise DatasetError(f"{path}: no rows; a data set needs at least one json object per line")
    return rows


def boxed(answer: str | int | float) -> str:
    """An answer as the tutorial writes it: 43.0 -> `\\boxed{43}`, 1e-3 -> `\\boxed{0.001}`; boxed text stays."""
    if isinstance(answer, float):
        answer = int(answer) if answer.is_integer() else f"{Decimal(str(answer)):f}"
    text = str(answer).strip()
    return text if "\\boxed" in text else f"\\boxed{{{text}}}"


def read_records(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """(line number, json object) of every line that is not blank. Raises DatasetError with file and line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        yield number, _parse_line(line)
                    except (ValueError, RecursionError) as error:
                        raise DatasetError(f"{path}:{number}: {error}") from error
    except OSError as error:
        raise DatasetError(f"{path}: cannot read the data set: {error.strerror}; name a jsonl file") from error


def detect_fields(record: Mapping[str, object]) -> Fields:
    """Where a row has its prompt and its answer. Raises ValueError for a schema that is not known."""
    if "prompt" in record:
        return Fields("prompt", "answer" if "answer" in record and "solutions" not in record else "solutions")
    if "problem" in record:
        return Fields("problem", "answer" if "answer" in record else "solution")
    if "question" in record:
        return Fields("question", "answer")
    if "input" in record:
        return Fields("input", "target")
    raise ValueError(
        f"no prompt among the keys {sorted(record)}; a row has prompt + solutions, prompt + answer, problem + answer, "
        "question + answer, or input + target"
    )


def _read(path: Path, fields: Fields | None) -> Iterator[Row]:
    for number, record in read_records(path):
        try:
            yield _row(record, number, fields, default_id=f"{path.stem}-{number}")
        except ValueError as error:
            raise DatasetError(f"{path}:{number}: {error}") from error


def _parse_line(line: bytes) -> dict[str, object]:
    try:
        record = json.loads(line.decode("utf-8-sig").rstrip())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not a json object: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected a json object, found {type(record).__name__}")
    return record


def _row(record: dict[str, object], number: int, given: Fields | None, default_id: str) -> Row:
    fields = given or detect_fields(record)
    # A row of GSM8K that lost its last line must not become a question whose answer is a chain of thought.
    must_be_marked = given is None and fields.prompt == "question"
    solutions = _solutions(record, fields.answer, must_be_marked=must_be_marked)
    prompt = _text(record, fields.prompt)
    id_key = next((key for key in ("query_id", "unique_id", "id") if record.get(key) is not None), None)
    used = {fields.prompt, fields.answer, id_key, "task"}
    return Row(
        line=number,
        query_id=default_id if id_key is None else str(record[id_key]),
        task=str(record.get("task", "math")),
        prompt=prompt,
        solutions=solutions,
        meta={key: value for key, value in record.items() if key not in used},
    )


def _solutions(record: dict[str, object], key: str, *, must_be_marked: bool) -> tuple[str, ...]:
    """The solutions of a row: a list, a scalar, or what follows #### at the end of a text."""
    if key == "solutions" or isinstance(record.get(key), list):
        return _listed_solutions(record, key)
    _, marker, final = str(record.get(key)).rpartition("####")
    if marker and final.strip():
        return (boxed(_THOUSANDS.sub("", final)),)
    if must_be_marked:
        _text(record, key)
        raise ValueError(f"\"{key}\" must end in '#### <number>', as GSM8K writes it")
    return (_scalar_solution(record, key),)


def _listed_solutions(record: dict[str, object], key: str) -> tuple[str, ...]:
    """`solutions` of the tutorial's schema; tasks other than math may do without."""
    solutions = record.get(key)
    if solutions is None and record.get("task", "math") != "math":
        return ()
    if not isinstance(solutions, list) or not solutions or not all(isinstance(s, str) and s.strip() for s in solutions):
        raise ValueError(f'"{key}" must be a list of non-empty strings, found {_shown(solutions)}')
    return tuple(boxed(solution) if record.get("task", "math") == "math" else solution for solution in solutions)


def _scalar_solution(record: dict[str, object], key: str) -> str:
    value = record.get(key)
    usable = isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip()
    if not usable or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f'"{key}" must be a string or a number, found {_shown(value)}')
    if key == "solution" and "\\boxed" not in str(value):
        raise ValueError('"solution" has no \\boxed{...} and the row has no "answer"')
    assert isinstance(value, str | int | float), "checked above"
    return boxed(value)


def _text(record: dict[str, object], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f'"{key}" must be a non-empty string, found {_shown(value)}')
    value.encode()  # a lone surrogate is valid json and would fail in the tokenizer, far from its line
    return value


def _shown(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"


def _with_unique_ids(rows: list[Row], path: Path) -> list[Row]:
    """Name the second row of an id `id#2`, and so on: nothing is lost and every count by query_id stays right."""
    taken = {row.query_id for row in rows}
    seen: dict[str, int] = {}
    unique = []
    for row in rows:
        count = seen[row.query_id] = seen.get(row.query_id, 0) + 1
        if count > 1:
            name = f"{row.query_id}#{count}"
            while name in taken:
                name += "'"
            taken.add(name)
            row = replace(row, query_id=name)
        unique.append(row)
    repeated = len(rows) - len(seen)
    if repeated:
        logger.warning(
            "%s: %d rows repeat a query_id of an earlier row; kept, as <query_id>#2 and so on", path, repeated
        )
    return unique
