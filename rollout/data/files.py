"""The records of a data set, wherever it is: a file, a glob, a folder of files, a saved or a Hugging Face data set.

Files have any format: jsonl, json, csv, tsv, parquet
and arrow; the text formats also compressed, and these need the standard library only. Invariants: the same source gives
the same records in the same order on every machine; a record is a dictionary with its place (file and line or row), and
whatever cannot be read is a DatasetError that names the place.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from glob import glob, has_magic
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import IO, AnyStr, Protocol, cast

from model_specs.hub import HUB_SECONDS
from model_specs.untrusted import UntrustedFileError, is_inside, open_regular, parse_json, read_json_object
from rollout.data.source import SPLIT_NAMES, DatasetError, DataSource

_LONGEST_LINE = 2**24
"""In bytes, also of a cell: the tokens of a text take a hundred times its memory."""
_LONGEST_LIST = 2**29
"""Of a compressed file, which could be as long as the memory."""
_OPENERS: dict[bytes, Callable[[IO[bytes]], object]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}
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
    content = file.read(-1 if isinstance(file, io.BufferedReader) else _LONGEST_LIST)
    if len(content) == _LONGEST_LIST:
        raise DatasetError(f"{path}: more than {_LONGEST_LIST >> 20} MiB in one list; write jsonl, one row a line")
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


class _Batch(Protocol):
    """Rows of an arrow file."""

    def to_pylist(self) -> list[dict[str, object]]: ...


def _records(path: Path, batches: Iterator[_Batch]) -> Iterator[Record]:
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


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PARTS = re.compile(r"[-_.\d]|of")
"""What stands beside the name of a split in file names: train-00000-of-00002.parquet."""


def stored_records(source: DataSource) -> Iterator[Record]:
    """Yield every record of a data set. Raises DatasetError when there is none, or one cannot be read."""
    if is_hub_id(source):
        yield from _hub_records(source)
        return
    num_records = 0
    for path in data_files(source):
        for record in read_file(path):
            num_records += 1
            yield record
    if not num_records:
        raise DatasetError(f"{source.path}: no rows; a data set needs at least one")


def is_hub_id(source: DataSource) -> bool:
    """Return whether a path is the id of a Hugging Face data set: owner/name, and no such file or folder."""
    looks = _HUB_ID.fullmatch(source.path) is not None and suffix_of(Path(source.path)) is None
    return looks and not os.path.exists(source.path)


def data_files(source: DataSource) -> list[Path]:
    """Return the files of a local data set, in order. Raises DatasetError."""
    try:
        path = Path(source.path).expanduser()
    except RuntimeError as error:
        raise DatasetError(f"{source.path}: there is no such home folder; write the path in full") from error
    if has_magic(str(path)) and not os.path.exists(path):
        found = sorted(Path(name) for name in glob(str(path), recursive=True))
        if not found:
            raise DatasetError(f"{source.path}: no file matches")
        return found
    if not os.path.isdir(path):  # Path.is_dir raises for a folder inside one that may not be entered
        _refuse_split(source)
        return [path]
    return _files_of_folder(path, source)


def _refuse_split(source: DataSource) -> None:
    for name in ("split", "subset"):
        if (value := getattr(source, name)) is not None:
            raise DatasetError(
                f"{source.path}: {name}={value!r}, but this is one file; remove {name}, or name a folder or the id of "
                "a Hugging Face data set"
            )


def _files_of_folder(folder: Path, source: DataSource) -> list[Path]:
    """Return the files of the split and the subset in a folder of data files or of a saved data set."""
    if source.subset is not None:
        if not (folder / source.subset).is_dir():
            below = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
            raise DatasetError(f"{folder}: no subset {source.subset!r}; folders in it: {', '.join(below) or 'none'}")
        folder = folder / source.subset
    if (folder / "dataset_dict.json").is_file():  # of DatasetDict.save_to_disk
        names = _names(folder / "dataset_dict.json", "splits")
        splits = {name: _saved_files(folder / name) for name in names}
    elif (folder / "state.json").is_file():  # of Dataset.save_to_disk
        _refuse_split(source)
        return _saved_files(folder)
    else:
        splits = _by_split(folder)
    if not splits:
        raise DatasetError(f"{folder}: no data files in this folder; it needs files of {known_formats()}")
    chosen = splits[choose_split(source, list(splits))]
    _check_one_set(folder, chosen)
    return chosen


def choose_split(source: DataSource, splits: Sequence[str]) -> str:
    """Return the split to read. Raises DatasetError where it is not there, or none is given and none is obvious."""
    wanted = (source.split,) if source.split is not None else source.splits
    chosen = next((name for name in wanted if name in splits), None)
    if chosen is None and source.split is None and len(splits) == 1:
        return splits[0]
    if chosen is None:
        missing = f"no split {source.split!r}" if source.split is not None else "which split is not given"
        raise DatasetError(f"{source.path}: {missing}; it has {', '.join(splits)}: set split to one of them")
    return chosen


def _saved_files(folder: Path) -> list[Path]:
    return [folder / name for name in _names(folder / "state.json", "_data_files")]


def _names(path: Path, key: str) -> list[str]:
    """Return the names at a key of a file that save_to_disk() wrote, of files or folders beside it."""
    try:
        listed = read_json_object(path).get(key)
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: not readable: {error}") from error
    entries = listed if isinstance(listed, list) else []
    names = [entry.get("filename") if isinstance(entry, dict) else entry for entry in entries]
    inside = [name for name in names if is_inside(name)]
    if not inside or len(inside) < len(names):
        raise DatasetError(
            f"{path}: {key} must list files of this folder, found {listed!r:.80}; save the data set again"
        )
    return inside


def _by_split(folder: Path) -> dict[str, list[Path]]:
    """Return the data files below a folder by split: the split is in the name of the file or of its folder. A file that
    names none belongs to "train" where no file does, else to none."""
    found = sorted(
        p
        for p in folder.rglob("*")
        if suffix_of(p) is not None
        and p.is_file()
        and not any(part.startswith(".") for part in p.relative_to(folder).parts)
    )
    described = {"dataset_info.json", "dataset_infos.json", "config.json", "state.json"}
    splits: dict[str | None, list[Path]] = {}
    for path in found:
        if path.name not in described:
            splits.setdefault(_split_of(path.relative_to(folder)), []).append(path)
    unnamed = splits.pop(None, [])
    if not splits and unnamed:
        return {"train": unnamed}
    return {name: of for name, of in splits.items() if name is not None}


def _check_one_set(folder: Path, paths: Sequence[Path]) -> None:
    """Raise DatasetError where files of several subsets, or in several formats, would be read as one set."""
    places = sorted({str(p.parent.relative_to(folder)) for p in paths})
    if len(places) > 1:
        raise DatasetError(f"{folder}: files of one split in several folders ({', '.join(places)}); set subset to one")
    formats = sorted({str(suffix_of(p)) for p in paths})
    if len(formats) > 1:
        raise DatasetError(f"{folder}: {' and '.join(formats)} files of one split; name one of them, or a glob")


def _split_of(path: Path) -> str | None:
    """Return the split that the name of a file, or of its folder, begins with."""
    for part in (path.name, *reversed(path.parent.parts)):
        word = _PARTS.split(part.lower(), maxsplit=1)[0]
        if word in SPLIT_NAMES:
            return SPLIT_NAMES[word]
    return None


def _hub_records(source: DataSource) -> Iterator[Record]:
    """Yield the records of a Hugging Face data set, from the cache or the network."""
    try:
        import datasets
    except ImportError as error:
        raise DatasetError(
            f"{source.path}: no such file or folder; loading the Hugging Face data set of that id needs the library "
            "datasets: pip install datasets"
        ) from error
    datasets.disable_progress_bars()
    with _cache_alone_if_unreachable(source.path) as reason:
        try:
            loaded = datasets.load_dataset(source.path, name=source.subset, split=source.split)
        except Exception as error:  # noqa: BLE001 - the library raises errors of requests, of hub, of arrow and its own
            cause = reason if reason is not None and isinstance(error, ConnectionError) else error
            raise DatasetError(_hub_problem(source.path, cause)) from error
    rows = loaded if source.split is not None else loaded[choose_split(source, list(loaded))]
    if not len(rows):
        raise DatasetError(f"{source.path}: no rows; a data set needs at least one")
    for number, values in enumerate(rows, start=1):
        yield Record(f"{source.path}: row {number}", number, dict(values))


@contextmanager
def _cache_alone_if_unreachable(name: str) -> Iterator[Exception | None]:
    """Ask the hub once whether it answers; if not, yield why, and let the libraries look into their cache alone
    meanwhile: they would try again for half a minute."""
    import datasets
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    reason: Exception | None = None
    try:
        HfApi().dataset_info(name, timeout=HUB_SECONDS)
    except HfHubHTTPError:  # it answers: the library finds out what is wrong
        pass
    except Exception as error:  # noqa: BLE001 - errors of the network are those of httpx
        is_late = "Timeout" in type(error).__name__
        reason = TimeoutError(f"no answer within {HUB_SECONDS:g} s") if is_late else error
    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if reason is not None:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield reason
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _hub_problem(name: str, error: Exception) -> str:
    """Return what to do where a Hugging Face data set cannot be loaded."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    if "Config name is missing" in str(error) or "BuilderConfig" in str(error):
        choices = re.search(r"\[.*?\]", str(error), re.DOTALL)
        return f"{name}: set subset to one of {choices.group() if choices else first}"
    if "split" in first:
        return f"{name}: {first}; set split to one that it has"
    return (
        f"{name}: no such file or folder here, and the Hugging Face data set of that id cannot be loaded ({first}). "
        f"Without network: run `hf download {name} --repo-type dataset --local-dir FOLDER` on a machine that has it, "
        "and set the path to that folder"
    )
