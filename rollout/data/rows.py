"""Rows as users have them, read into one form. Standard library only: a --dry-run checks a data set with it.

scan_rows() reads prompts with the solutions that rewards compare with, read_examples() prompts with the answers that
fine-tuning trains on. Files are read in files.py, columns found in source.py. Invariant: a `Row` that comes out of
here has a prompt, a unique query_id and, where solutions are needed, at least one; whatever cannot be read that way is
an error that names file and row.

Answers of preference pairs are texts, or conversations as Hugging Face preference sets have them, whose common
beginning is the prompt.
"""

import hashlib
import inspect
import json
import logging
import os
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from rollout.data.answers import (
    LETTERS,
    full_text,
    is_marked,
    read_options,
    right_letter,
    shuffled,
    solutions_of,
    text_of,
    with_options,
)
from rollout.data.chat_template import Messages, is_conversation, read_messages, read_tools, split_answer
from rollout.data.data_juicer import Recipe, is_recipe, load_recipe
from rollout.data.files import Record, stored_records
from rollout.data.source import PROMPTS, Columns, DatasetError, DataSource, as_source, find_columns, printable, value_of
from rollout.plugins import PluginError, load_plugin, make_state_folder, state_folder, user_place

Rows = Iterable[dict[str, object]]
Processor = Callable[[Rows], Rows]
"""Gets the rows in their order, and returns or yields those to use."""

_REPORT_EVERY_SECONDS = 10.0


def read_records(source: DataSource) -> Iterator[Record]:
    """Yield every record of a data set, as its processors return them. Raises DatasetError when there is none, one
    cannot be read, or a processor fails."""
    if not source.processors:
        yield from stored_records(source)
        return
    rows = _processed(source, [record.values for record in stored_records(source)])
    if not rows:
        raise DatasetError(f"{source.path}: no row is left by {', '.join(source.processors)}", setting="processors")
    for number, values in enumerate(rows, start=1):
        yield Record(f"{source.path}, processed row {number}", number, values)


def _processed(source: DataSource, rows: Sequence[dict[str, object]]) -> Sequence[dict[str, object]]:
    try:
        processors = {spec: _processor(spec) for spec in source.processors}
    except (PluginError, OSError) as error:
        raise DatasetError(str(error), setting="processors") from error
    kept = _place_of(rows, processors)
    if kept is not None and kept.is_file():
        logger.info("%s: rows as %s left them before (%s)", source.path, ", ".join(processors), kept)
        return [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
    for spec, processor in processors.items():
        rows = _run(spec, processor, source.path, rows)
    if kept is None or (lines := _lines(rows)) is None:
        logger.info("%s: the processed rows are not kept, as they are not plain values", source.path)
        return rows
    make_state_folder(kept.parent)
    written = kept.with_suffix(f".{os.getpid()}")
    written.write_text("".join(lines), encoding="utf-8")
    written.rename(kept)
    return [json.loads(line) for line in lines]  # the same rows as the next time, where JSON changes a type


def _processor(spec: str) -> Processor:
    """Return a function by its import path, or what runs a recipe of Data-Juicer by its file."""
    if is_recipe(spec):
        return load_recipe(spec)
    found: Processor = load_plugin(spec, kind="processor", arguments=("rows",))
    return found


def _run(spec: str, processor: Processor, path: str, rows: Sequence[dict[str, object]]) -> Sequence[dict[str, object]]:
    began, left = time.monotonic(), list[dict[str, object]]()
    try:
        for row in processor(_reported(spec, path, rows)):
            if not isinstance(row, Mapping):
                raise TypeError(f"it returned {row!r:.60}, which is no row; return dictionaries")
            left.append(dict(row))
    except Exception as error:
        place = user_place(error)
        where = f" ({place})" if place else ""
        message = f"{path}: processor {spec} failed with {type(error).__name__}: {error}{where}"
        raise DatasetError(message, setting="processors") from error
    logger.info("%s: %s made %d of %d rows in %.1f s", path, spec, len(left), len(rows), time.monotonic() - began)
    return left


def _reported(spec: str, path: str, rows: Sequence[dict[str, object]]) -> Iterator[dict[str, object]]:
    """Yield copies of rows, and log how many a processor has taken."""
    due = time.monotonic() + _REPORT_EVERY_SECONDS
    for number, row in enumerate(rows):
        if time.monotonic() >= due:
            logger.info("%s: %s has taken %d of %d rows", path, spec, number, len(rows))
            due = time.monotonic() + _REPORT_EVERY_SECONDS
        yield dict(row)


def _place_of(rows: Sequence[dict[str, object]], processors: Mapping[str, Processor]) -> Path | None:
    """Return the file that keeps what processors make of rows; None where it could be that of others."""
    if (lines := _lines(rows)) is None:
        return None
    digest = hashlib.sha256()
    for part in (*lines, *processors, *map(_source_of, processors.values())):
        digest.update(f"{len(part)} {part}".encode())
    try:
        return state_folder() / "processed" / f"{digest.hexdigest()[:32]}.jsonl"
    except RuntimeError:  # the user has no home
        return None


def _source_of(processor: Processor) -> str:
    """Return the text of the module that a processor is from, or of its recipe; empty where it has none."""
    if isinstance(processor, Recipe):
        return processor.text
    try:
        return inspect.getsource(inspect.getmodule(inspect.unwrap(processor)) or processor)
    except (OSError, TypeError):
        return ""


def _lines(rows: Sequence[dict[str, object]]) -> list[str] | None:
    """Return rows as lines of JSON; None where they have other values."""
    try:
        return [json.dumps(row) + "\n" for row in rows]
    except (TypeError, ValueError):
        return None


logger = logging.getLogger(__name__)

T = TypeVar("T")

_LIKE_AN_ANSWER = re.compile("answer|solution|result|truth|target|label|gold|expected|reference", re.IGNORECASE)
_BROKEN = (ValueError, TypeError, KeyError, OverflowError)
"""What a row of unexpected types raises."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt before tokenisation. `meta` holds the columns that have no meaning here."""

    place: str
    """File and line, or file and number of the row."""
    query_id: str
    task: str
    prompt: str
    solutions: tuple[str, ...]
    messages: Messages | None = None
    """The conversation that the completion continues; None: the prompt is one text."""
    tools: tuple[object, ...] | None = None
    """Functions for the chat template."""
    meta: Mapping[str, object] = field(default_factory=dict)


def columns_by_task(rows: Iterable[Row]) -> dict[str, set[str]]:
    """Return the columns that rows of each task have beside the prompt: `meta`, messages, tools and solutions."""
    columns: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        known = {"messages": row.messages, "tools": row.tools, "solutions": row.solutions}
        columns[row.task].update(row.meta, (name for name in known if known[name]))
    return columns


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row of fine-tuning: a prompt with its answer, or a conversation with the assistant's turns."""

    place: str
    prompt: str = ""
    answer: str = ""
    messages: Messages | None = None
    """None: prompt and answer are one text each."""
    num_untrained: int = 0
    """Number of messages at the beginning that are never trained on."""
    tools: tuple[object, ...] | None = None


def scan_rows(source: str | Path | DataSource, *, solved: bool = True) -> list[Row]:
    """Read and check every row of a data set. A repeated query_id is kept under a new name.

    solved: every row needs a solution, because reward.function=math compares with it.
    Raises DatasetError with file and row for the first row that cannot be used, and where there are none.
    """
    source = as_source(source)
    marked: set[Columns] = set()
    unmarked: dict[Columns, str] = {}

    def parse(record: Record, columns: Columns) -> Row:
        row = _row(record, columns, source, solved=solved)
        answer = _answer(record.values, columns)
        if is_marked(answer):
            marked.add(columns)
        elif isinstance(answer, str) and not columns.choices:
            unmarked.setdefault(columns, f'{record.place}: "{_answer_column(record.values, columns)}"')
        return row

    rows = _read(source, parse, in_full=False)
    # A row of GSM8K that lost its last line must not become a question whose answer is a chain of thought.
    for place in (unmarked[columns] for columns in unmarked.keys() & marked if solved):
        raise DatasetError(f"{place} must end in '#### <number>', as other rows do")
    likely = [name for name in rows[0].meta if _LIKE_AN_ANSWER.search(name)]
    if likely and not any(row.solutions for row in rows):
        names = printable(" or ".join(likely))
        message = "%s: no row has an answer, so prompt.answers is empty; if it is in %s, set dataset.answer_field"
        logger.warning(message, source.path, names)
    return _with_unique_ids(rows, source.path)


def checksum_of(rows: Iterable[Row | Example], start: int = 0) -> int:
    """Return a checksum of what rows say, wherever they are stored: not of their names, nor of rendered text, which may
    have a date."""
    for row in rows:
        said = row.solutions if isinstance(row, Row) else (row.answer, row.num_untrained)
        what = json.dumps([row.prompt, said, row.messages, row.tools], sort_keys=True, default=str)
        start = zlib.crc32(what.encode(), start)
    return start


def identify(rows: Sequence[Row]) -> dict[str, int]:
    """Return the number and a checksum of the rows, to compare data sets before they are tokenised."""
    return {"num_rows": len(rows), "rows_checksum": checksum_of(rows)}


def read_examples(source: str | Path | DataSource) -> list[Example]:
    """Read every row of a data set, for supervised fine-tuning; errors as scan_rows()."""
    return _read(as_source(source), _example, in_full=True)


def _read(source: DataSource, parse: Callable[[Record, Columns], T], *, in_full: bool) -> list[T]:
    """Parse every record with its columns. Logs which columns are used and which are not."""
    parsed: list[T] = []
    known: dict[tuple[str, ...], Columns] = {}
    for record in read_records(source):
        try:
            names = tuple(record.values)
            if names not in known:
                known[names] = find_columns(names, source.fields, source.hints, in_full=in_full)
            parsed.append(parse(record, known[names]))
        except _BROKEN as error:
            setting = error.setting if isinstance(error, DatasetError) else ""
            raise DatasetError(f"{record.place}: {error}", setting=setting) from error
    unused = dict.fromkeys(name for names, columns in known.items() for name in names if name not in columns.used)
    found = dict.fromkeys(str(columns) for columns in known.values())
    columns = f"{' | '.join(found)}; not used: {', '.join(unused) or 'none'}"
    logger.info("%s: %d rows; %s", source.path, len(parsed), printable(columns))
    return parsed


def _answer_column(record: Mapping[str, object], columns: Columns) -> str | None:
    """Return the first answer column that is filled in; the first of all where none is."""
    filled = (name for name in columns.answers if value_of(record, name) is not None)
    return next(filled, columns.answers[0] if columns.answers else None)


def _answer(record: Mapping[str, object], columns: Columns) -> object:
    column = _answer_column(record, columns)
    return None if column is None else value_of(record, column)


def _row(record: Record, columns: Columns, source: DataSource, *, solved: bool) -> Row:
    values = record.values
    task = str(values[columns.task]) if columns.task and values[columns.task] is not None else "math"
    prompt, messages, last_turn = _prompt(values, columns)
    column = _answer_column(values, columns)
    answer = last_turn if column is None else value_of(values, column)
    if columns.choices:
        prompt, answer = _multiple_choice(values, columns, prompt, answer)
        messages = None
    given_id = values.get(columns.query_id) if columns.query_id else None
    return Row(
        place=record.place,
        query_id=str(given_id) if given_id is not None else f"{source.name}-{record.number}",
        task=task,
        prompt=prompt,
        solutions=solutions_of(answer, column, task=task, needed=solved, columns=list(values)),
        messages=messages,
        tools=read_tools(value_of(values, columns.tools), columns.tools) if columns.tools else None,
        meta={key: value for key, value in values.items() if key not in columns.used},
    )


def _prompt(values: Mapping[str, object], columns: Columns) -> tuple[str, Messages | None, str | None]:
    """Return (text, conversation if it is one, the answer that ends the conversation)."""
    name = columns.prompt[0] if columns.prompt else columns.messages
    assert name is not None, "find_columns() requires one of them"
    if columns.prompt and not is_conversation(values.get(name)):
        return _question(values, columns), None, None
    messages, last_turn = split_answer(_conversation(values, name, columns))
    if not messages:
        raise ValueError(f'"{name}" has only turns of the assistant, and no prompt')
    return "\n".join(str(message["content"]) for message in messages), messages, last_turn


def _conversation(values: Mapping[str, object], name: str, columns: Columns) -> Messages:
    """Return the messages in a column, behind the system message of a column of its own."""
    messages = read_messages(value_of(values, name), name)
    system = value_of(values, columns.system) if columns.system is not None else None
    if not system or messages[0]["role"] == "system":
        return messages
    return ({"role": "system", "content": text_of(system, str(columns.system))}, *messages)


def _question(values: Mapping[str, object], columns: Columns) -> str:
    """Return the question in all its parts; Body + Question is one paragraph."""
    names = columns.prompt
    main = next((name for name in names if name.lower() in PROMPTS), names[0])
    parts = {name: text_of(value_of(values, name), name) for name in names if name == main or value_of(values, name)}
    if names[0].lower() == "body" and len(parts) > 1:
        body, question = parts.values()
        body = body.strip()
        return f"{body}{'' if body[-1] in '.?!' else '.'} {question.strip()}"
    return "\n\n".join(parts.values())


def _multiple_choice(
    values: Mapping[str, object], columns: Columns, question: str, answer: object
) -> tuple[str, object]:
    """Return the question with its options, and the letter of the right one."""
    if len(columns.choices) == 1:
        if values[columns.choices[0]] is None:
            return question, answer
        texts, labels = read_options(value_of(values, columns.choices[0]))
    else:
        texts = [str(values[name]).strip() for name in columns.choices if values[name] is not None]
        labels = list(LETTERS[: len(texts)])
        if columns.choices[0] in columns.answers:  # Correct Answer, Incorrect Answer 1, ...
            texts, letter = shuffled(question, texts)
            return with_options(question, texts), letter
    return with_options(question, texts), right_letter(answer, texts, labels)


def _example(record: Record, columns: Columns) -> Example:
    values = record.values
    tools = read_tools(value_of(values, columns.tools), columns.tools) if columns.tools else None
    if columns.messages is not None and values.get(columns.messages) is not None:
        messages = _conversation(values, columns.messages, columns)
        roles = {message["role"] for message in messages}
        if "assistant" not in roles:
            raise ValueError(
                f'"{columns.messages}" has no turn of the assistant to train on, only {sorted(roles)}; '
                "name it assistant or gpt"
            )
        return Example(place=record.place, messages=messages, tools=tools)
    prompt, messages_before, last_turn = _prompt(values, columns)
    column = _answer_column(values, columns)
    if column is not None and is_conversation(value_of(values, column)):
        before = messages_before or ({"role": "user", "content": prompt},)
        written = read_messages(value_of(values, column), column)
        return Example(place=record.place, messages=(*before, *written), num_untrained=len(before), tools=tools)
    answer = last_turn if column is None else full_text(value_of(values, column), column)
    if answer is None:
        raise ValueError(f"no answer among the columns {sorted(values)}; name it with answer_field")
    if columns.choices:
        prompt, letter = _multiple_choice(values, columns, prompt, answer)
        return Example(place=record.place, prompt=prompt, answer=str(letter), tools=tools)
    if messages_before is not None:
        turn = {"role": "assistant", "content": answer}
        return Example(place=record.place, messages=(*messages_before, turn), tools=tools)
    return Example(place=record.place, prompt=prompt, answer=answer, tools=tools)


def _with_unique_ids(rows: list[Row], path: str) -> list[Row]:
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


def _pair(record: Mapping[str, object], fields: PreferenceFields, place: str) -> Preference:
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


def _dialogue(text: object) -> object:
    """Return the turns of a dialogue in one text, as hh-rlhf has them; anything else unchanged."""
    first, *turns = _SPEAKER.split(text) if isinstance(text, str) else [""]
    if first.strip() or not turns:
        return text
    return [{"role": role, "content": said.strip()} for role, said in zip(turns[::2], turns[1::2], strict=True)]


def _text(record: Mapping[str, object], name: str, role: str) -> str:
    if name not in record:
        raise ValueError(f"no {role} under {name!r}, only {sorted(record)}; set dataset.{role}_field to its column")
    try:
        return text_of(record[name], name)
    except ValueError as error:
        raise ValueError(f"{error}; set dataset.{role}_field to its column") from error


def _conversations(prompt: object, chosen: Messages, rejected: Messages, place: str) -> Preference:
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


def by_column(rows: Sequence[Row], column: str, path: str) -> list[Row]:
    """Return rows sorted by a column of numbers or texts. Raises DatasetError where a row has none, or they cannot be
    compared."""
    values = [row.task if column == "task" else row.meta.get(column) for row in rows]
    for row, value in zip(rows, values, strict=True):
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise DatasetError(f"{row.place}: curriculum={column!r} has no number or text here, but {value!r:.40}")
    if len({isinstance(value, str) for value in values}) > 1:
        raise DatasetError(f"{path}: curriculum={column!r} holds numbers and texts, which have no common order")
    order = sorted(range(len(rows)), key=lambda i: values[i])  # type: ignore[arg-type, return-value]
    return [rows[i] for i in order]
