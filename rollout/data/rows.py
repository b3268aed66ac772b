"""jsonl rows as users have them, read into one form. Standard library only: a --dry-run checks a data set with it.

SCHEMAS lists the schemas, which are recognised by their keys; of any other, `Fields` names the keys. scan_rows() reads
prompts with the solutions that rewards compare with, read_pairs() prompts with the answers that fine-tuning trains on.
Invariant: a `Row` that comes out of here has a prompt, a unique query_id and, for task "math", at least one solution in
a box; whatever cannot be read that way is an error that names file and line.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

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


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The keys of one kind of row. Of several keys for one thing, the first that a row has counts."""

    prompt: str
    solutions: tuple[str, ...]
    """What a completion is compared with."""
    answers: tuple[str, ...]
    """What fine-tuning trains on: where there are both, the answer in full."""


SCHEMAS = (
    # The tutorial's.
    Schema(prompt="prompt", solutions=("solutions", "answer"), answers=("answer", "solutions")),
    # MATH, AIME, AMC.
    Schema(prompt="problem", solutions=("answer", "solution"), answers=("solution", "answer")),
    # GSM8K: the answer ends in "#### <number>".
    Schema(prompt="question", solutions=("answer",), answers=("answer",)),
    # MAWPS.
    Schema(prompt="input", solutions=("target",), answers=("target",)),
)


def scan_rows(path: str | Path, fields: Fields | None = None) -> list[Row]:
    """Read and check every row of a jsonl file; blank lines are skipped. A repeated query_id is kept under a new name.
    `fields`: where prompt and answer are; None: detect_fields() of each row.

    Raises DatasetError with file and line for the first row that cannot be used, and for a missing or empty file.
    """
    path = Path(path)
    rows = _read(path, lambda record, line: _row(record, line, fields, default_id=f"{path.stem}-{line}"))
    return _with_unique_ids(rows, path)


def read_pairs(path: str | Path) -> list[tuple[str, str]]:
    """Read (prompt, answer) of every row of a jsonl file, for supervised fine-tuning; errors as scan_rows()."""
    return _read(Path(path), lambda record, line: _pair(record))


def boxed(answer: str | int | float) -> str:
    """Return an answer as the tutorial writes it: 43.0 -> `\boxed{43}`, 1e-3 -> `\boxed{0.001}`; boxed text stays."""
    text = _scalar_text(answer).strip()
    return text if "\\boxed" in text else f"\\boxed{{{text}}}"


def read_records(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (line number, JSON object) of every line that is not blank. Raises DatasetError with file and line."""
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
    """Return the fields that hold prompt and answer. Raises ValueError for an unknown schema."""
    schema = _schema_of(record)
    return Fields(schema.prompt, _first(schema.solutions, lambda key: key in record))


def _schema_of(record: Mapping[str, object]) -> Schema:
    for schema in SCHEMAS:
        if schema.prompt in record:
            return schema
    raise ValueError(
        f"no prompt among the keys {sorted(record)}; a row has prompt + solutions, prompt + answer, problem + answer, "
        "question + answer, or input + target"
    )


def _first(keys: Sequence[str], fits: Callable[[str], bool]) -> str:
    """Return the first of `keys` that fits, or else the first of all, for an error to name."""
    return next((key for key in keys if fits(key)), keys[0])


def _read(path: Path, parse: Callable[[dict[str, object], int], T]) -> list[T]:
    """Parse every record with its line number. Raises DatasetError, with file and line where there is one."""
    parsed = []
    for number, record in read_records(path):
        try:
            parsed.append(parse(record, number))
        except ValueError as error:
            raise DatasetError(f"{path}:{number}: {error}") from error
    if not parsed:
        raise DatasetError(f"{path}: no rows; a data set needs at least one json object per line")
    return parsed


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
    """Return the solutions of a row: a list, a scalar, or what follows #### at the end of a text."""
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
    """Return `solutions` of the tutorial's schema; only rows of task math must have some."""
    solutions = record.get(key)
    if solutions is None and record.get("task", "math") != "math":
        return ()
    is_math = record.get("task", "math") == "math"
    return tuple(boxed(solution) if is_math else solution for solution in _texts(record, key))


def _texts(record: dict[str, object], key: str) -> list[str]:
    """Return a list of strings that are not blank."""
    values = record.get(key)
    if not isinstance(values, list) or not values or not all(isinstance(v, str) and v.strip() for v in values):
        raise ValueError(f'"{key}" must be a list of non-empty strings, found {_shown(values)}')
    for value in values:
        value.encode()  # see _text
    return values


def _scalar_solution(record: dict[str, object], key: str) -> str:
    value = _scalar(record, key)
    if key == "solution" and "\\boxed" not in str(value):
        raise ValueError('"solution" has no \\boxed{...} and the row has no "answer"')
    return boxed(value)


def _pair(record: dict[str, object]) -> tuple[str, str]:
    schema = _schema_of(record)
    key = _first(schema.answers, lambda key: record.get(key) is not None)
    answer = record.get(key)
    if isinstance(answer, list):
        answer = _texts(record, key)[0]
    elif not isinstance(answer, str):
        answer = _scalar_text(_scalar(record, key))
    else:
        answer = _text(record, key)
    return _text(record, schema.prompt), answer


def _scalar(record: dict[str, object], key: str) -> str | int | float:
    """Return a string that is not blank, or a finite number."""
    value = record.get(key)
    usable = isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip()
    if not usable or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f'"{key}" must be a string or a number, found {_shown(value)}')
    assert isinstance(value, str | int | float), "checked above"
    return value


def _scalar_text(value: str | int | float) -> str:
    """Return 43.0 as "43", 1e-3 as "0.001", text unchanged."""
    if isinstance(value, float):
        value = int(value) if value.is_integer() else f"{Decimal(str(value)):f}"
    return str(value)


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
