"""Functions of the user that change the rows of a data set before anything else reads them: filter, map, score,
deduplicate, or make new rows.

read_records() is the only way from a `DataSource` to its rows. What the functions return is kept in the state folder of
the user, by a checksum of the rows and of the modules of the functions, and read there the next time.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rollout.data.files import Record, stored_records
from rollout.data.source import DatasetError, DataSource
from rollout.plugins import PluginError, load_plugin, make_state_folder, state_folder, user_place

logger = logging.getLogger(__name__)

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
        processors = {spec: load_plugin(spec, kind="processor", arguments=("rows",)) for spec in source.processors}
    except PluginError as error:
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
    """Return the text of the module that a processor is from; empty where it has none."""
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
