"""The records of a data set, wherever it is: a file, a glob, a folder of files, a saved or a Hugging Face data set.

read_records() is the only way from a `DataSource` to its rows. Invariant: the same source gives the same records in the
same order on every machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from glob import glob, has_magic
from pathlib import Path

from model_specs.untrusted import is_inside, read_json_object
from rollout.data.files import Record, known_formats, read_file, suffix_of
from rollout.data.source import SPLIT_NAMES, DatasetError, DataSource

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PARTS = re.compile(r"[-_.\d]|of")
"""What stands beside the name of a split in file names: train-00000-of-00002.parquet."""


def read_records(source: DataSource) -> Iterator[Record]:
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
    try:
        loaded = datasets.load_dataset(source.path, name=source.subset, split=source.split)
    except Exception as error:  # noqa: BLE001 - the library raises errors of requests, of hub, of arrow and its own
        raise DatasetError(_hub_problem(source.path, error)) from error
    rows = loaded if source.split is not None else loaded[choose_split(source, list(loaded))]
    if not len(rows):
        raise DatasetError(f"{source.path}: no rows; a data set needs at least one")
    for number, values in enumerate(rows, start=1):
        yield Record(f"{source.path}: row {number}", number, dict(values))


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
