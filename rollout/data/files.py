"""One file of records in any format: jsonl, json, csv, tsv, parquet and arrow; the text formats also compressed.

The text formats need the standard library only. Invariant: a record that comes out of here is a dictionary with its
place (file and line or row), and whatever cannot be read is a DatasetError that names the place.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import IO, Any, AnyStr, cast

from model_specs.untrusted import UntrustedFileError, open_regular, parse_json
from rollout.data.source import DatasetError

_LONGEST_LINE = 2**29
"""In bytes, also of a cell and of a compressed list: of a small compressed file they could be as long as the memory."""
_OPENERS: dict[bytes, Callable[[Any], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
_ZSTD = b"\x28\xb5\x2f\xfd"
_COMPRESSED = ("gz", "bz2", "xz", "zst")
_LISTS = ("data", "rows", "examples", "instances", "questions")
"""Keys of a json object that hold the records of a data set."""


@dataclass(frozen=True)
class Record:
    """One row of a data set."""

    place: str
    """File and line, or file and number of the row."""
    number: int
    """Line or row, from 1."""
    values: dict[str, object]


def read_file(path: Path) -> Iterator[Record]:
    """Yield every record of a file. Raises DatasetError for one that is missing, no file, or not readable."""
    try:
        with open_regular(path) as file:
            start = cast(io.BufferedReader, file).peek(6)[:6]
            yield from _READERS[_format_of(path, start)](path, _decompressed(path, file, start))
    except OSError as error:
        raise DatasetError(
            f"{path}: cannot read the data set: {error.strerror or error}; name a file of rows ({known_formats()})"
        ) from error
    except UntrustedFileError as error:
        raise DatasetError(f"{error}; name a file of rows") from error
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise DatasetError(f"{path}: the compressed file ends early or is damaged: {error}") from error


def known_formats() -> str:
    """Return the formats for a message."""
    return "jsonl, json, csv, tsv, parquet or arrow"


def _format_of(path: Path, start: bytes) -> str:
    """Return the format of a file by its suffix, or by its first bytes where the suffix is no known one, or one of json
    on a file of another format."""
    suffix = suffix_of(path)
    if suffix not in (None, "jsonl", "json"):
        return suffix
    magic = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
    return next((name for bytes_, name in magic.items() if start.startswith(bytes_)), suffix or "jsonl")


def suffix_of(path: Path) -> str | None:
    """Return the format that the name of a file ends with; None: no known one."""
    suffixes = [s.lower().removeprefix(".") for s in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    last = {"ndjson": "jsonl", "pq": "parquet"}.get(suffixes[-1], suffixes[-1]) if suffixes else None
    return last if last in _READERS else None


def _decompressed(path: Path, file: IO[bytes], start: bytes) -> IO[bytes]:
    """Return a file to read the content from; compression is found by the first bytes, whatever the name."""
    if start.startswith(_ZSTD):
        raise DatasetError(f"{path}: compressed with zstd, which is not read: run `zstd -d` and name the result")
    return next((cast(IO[bytes], opener(file)) for magic, opener in _OPENERS.items() if start.startswith(magic)), file)


def _read_jsonl(path: Path, file: IO[bytes]) -> Iterator[Record]:
    for number, line in enumerate(_lines(path, file), start=1):
        place = f"{path}:{number}"
        if line.strip():
            try:
                yield Record(place, number, _json_object(line))
            except ValueError as error:
                raise DatasetError(f"{place}: {error}") from error


def _lines(path: Path, file: IO[AnyStr]) -> Iterator[AnyStr]:
    for number in count(1):
        line = file.readline(_LONGEST_LINE)
        if not line:
            return
        if len(line) == _LONGEST_LINE:
            raise DatasetError(f"{path}:{number}: a line of more than {_LONGEST_LINE >> 20} MiB; write one row a line")
        yield line


def _json_object(line: bytes) -> dict[str, object]:
    try:
        record = parse_json(line.rstrip())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not a json object: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected a json object, found {type(record).__name__}")
    return record


def _read_json(path: Path, file: IO[bytes]) -> Iterator[Record]:
    """Yield the objects of a list, of a list under a key such as "data", or of lines: some name jsonl files .json."""
    content = file.read(-1 if isinstance(file, io.BufferedReader) else _LONGEST_LINE)
    if len(content) == _LONGEST_LINE:
        raise DatasetError(f"{path}: more than {_LONGEST_LINE >> 20} MiB in one list; write jsonl, one row a line")
    try:
        tree = parse_json(content)
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and content.lstrip()[:1] == b"{":
            yield from _read_jsonl(path, io.BytesIO(content))
            return
        raise DatasetError(f"{path}:{error.lineno}: not json: {error.msg} at column {error.colno}") from error
    if isinstance(tree, dict):
        lists = [tree[key] for key in _LISTS if isinstance(tree.get(key), list)]
        tree = lists[0] if lists else [tree]
    if not isinstance(tree, list):
        raise DatasetError(f"{path}: expected a list of json objects, found {type(tree).__name__}")
    for number, record in enumerate(tree, start=1):
        place = f"{path}: row {number}"
        if not isinstance(record, dict):
            raise DatasetError(f"{place}: expected a json object, found {type(record).__name__}")
        yield Record(place, number, record)


def _read_table(path: Path, file: IO[bytes], delimiter: str) -> Iterator[Record]:
    csv.field_size_limit(_LONGEST_LINE)
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        rows = csv.reader(_lines(path, text), delimiter=delimiter, strict=True)
        try:
            header = next(rows, None)
            if header is None:
                return
            if len(set(header)) < len(header):
                twice = sorted({name for name in header if header.count(name) > 1})
                raise DatasetError(f"{path}:1: column {', '.join(map(repr, twice))} twice in the first line")
            for row in rows:
                if not row:
                    continue
                place = f"{path}:{rows.line_num}"
                if len(row) != len(header):
                    raise DatasetError(f"{place}: {len(row)} cells, and the first line names {len(header)} columns")
                yield Record(place, rows.line_num, {k: v if v else None for k, v in zip(header, row, strict=True)})
        except UnicodeDecodeError as error:
            raise DatasetError(f"{path}: not UTF-8 after line {rows.line_num}") from error
        except csv.Error as error:
            raise DatasetError(f"{path}:{rows.line_num}: {error}") from error


def _read_parquet(path: Path, _: IO[bytes]) -> Iterator[Record]:
    arrow = _pyarrow(path)
    try:
        with arrow.parquet.ParquetFile(path) as file:
            yield from _records(path, file.iter_batches(batch_size=256))
    except arrow.ArrowException as error:
        raise DatasetError(f"{path}: not a readable parquet file: {error}") from error


def _read_arrow(path: Path, _: IO[bytes]) -> Iterator[Record]:
    """Yield the records of an arrow stream, as Hugging Face data sets are saved, or of an arrow file."""
    arrow = _pyarrow(path)
    try:
        with arrow.memory_map(str(path)) as source:
            if source.read(6) == b"ARROW1":
                reader = arrow.ipc.open_file(source)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                source.seek(0)
                batches = iter(arrow.ipc.open_stream(source))
            yield from _records(path, batches)
    except arrow.ArrowException as error:
        raise DatasetError(f"{path}: not a readable arrow file: {error}") from error


def _pyarrow(path: Path) -> ModuleType:
    """Return pyarrow with the modules of its formats. Raises DatasetError without it."""
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise DatasetError(f"{path}: reading it needs pyarrow, which is not installed: pip install pyarrow") from error
    return pyarrow


def _records(path: Path, batches: Iterator[Any]) -> Iterator[Record]:
    number = 0
    for batch in batches:
        for values in batch.to_pylist():
            number += 1
            yield Record(f"{path}: row {number}", number, values)


_READERS: dict[str, Callable[[Path, IO[bytes]], Iterator[Record]]] = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "csv": partial(_read_table, delimiter=","),
    "tsv": partial(_read_table, delimiter="\t"),
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
"""The formats by suffix."""
