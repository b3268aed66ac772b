"""The rows of files that grow, read once, and columns of numbers with a copy in the cache of the user.

Each reading begins where the last one ended. Invariant: a line that cannot be read is left out and counted; one that is
not complete yet is read when it is.
The cache is `$XDG_CACHE_HOME/slipstream/studio`, by default below ~/.cache; folders of runs stay as they are.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

PIECE_BYTES = 4 << 20
"""Read at once; the lock of a table is held for the time that this takes to parse."""
MOST_LINE_BYTES = 16 << 20
"""A longer line counts as damaged. The answers of one sample take a few hundred kB."""
_PREVIEW_LINE_BYTES = 1 << 18


@dataclass
class Source:
    """What has been read of a file."""

    path: Path
    inode: int
    offset: int = 0
    """Bytes that were read, whole lines."""
    size: int = 0
    lines: int = 0
    damaged: int = 0
    first_damaged: int = 0
    """Number of the first line that cannot be read."""

    def is_same(self) -> bool:
        """Return whether the file still has what was read, and note its size."""
        try:
            found = self.path.stat()
        except OSError:
            return False
        self.size = found.st_size
        return found.st_ino == self.inode and found.st_size >= self.offset

    def as_row(self) -> dict[str, Any]:
        """Return the fields for a cache, with the name of the file instead of its path."""
        return {**vars(self), "path": self.path.name}

    @property
    def notes(self) -> list[str]:
        """Return the sentences on damaged lines that the page shows."""
        notes = []
        if self.damaged:
            some = "1 line" if self.damaged == 1 else f"{self.damaged:,} lines"
            notes.append(
                f"{self.path.name}: {some} of {self.lines:,} cannot be read, the first is line "
                f"{self.first_damaged:,}; the others are shown"
            )
        return notes


def source_of(path: Path) -> Source:
    """Return a file of which nothing was read yet. Raises OSError."""
    found = path.stat()
    return Source(path=path, inode=found.st_ino, size=found.st_size)


_turn = threading.Lock()
"""Held for one piece: parallel readers would only wait for the interpreter's lock."""
_REST_SECONDS = 0.002


def pieces(source: Source, stop: Callable[[], bool]) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """Yield what is new in a file, piece by piece, alternating with other readers. `stop`: checked before each piece.
    Raises OSError."""
    while not stop():
        with _turn:
            before = source.offset
            rows = next_rows(source)
            if source.offset == before:
                return
            yield rows
        time.sleep(_REST_SECONDS)


def next_rows(source: Source) -> list[tuple[int, dict[str, Any]]]:
    """Read the next piece of a file; return (offset, row) of its lines. Empty at the end. Raises OSError."""
    with open(source.path, "rb") as file:
        file.seek(source.offset)
        data = file.read(PIECE_BYTES)
        if b"\n" not in data:
            data += file.readline(MOST_LINE_BYTES)
        if not data.endswith(b"\n") and len(data) >= MOST_LINE_BYTES:
            while (more := file.readline(PIECE_BYTES)) and not more.endswith(b"\n"):
                pass
            if more:
                source.offset = file.tell()
                source.lines += 1
                source.damaged += 1
                source.first_damaged = source.first_damaged or source.lines
            return []
    rows = []
    end = data.rfind(b"\n") + 1
    offset = source.offset
    for line in data[:end].split(b"\n")[:-1]:
        source.lines += 1
        row = parsed(line)
        if row is not None:
            rows.append((offset, row))
        else:
            source.damaged += 1
            source.first_damaged = source.first_damaged or source.lines
        offset += len(line) + 1
    source.offset += end
    return rows


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line; None where it is none."""
    try:
        row = orjson.loads(line)
    except ValueError:
        try:
            row = json.loads(line)  # reads NaN and infinities, too
        except ValueError:
            return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def row_at(path: Path, offset: int) -> dict[str, Any] | None:
    """Return the row of the line that begins at a byte of a file. Raises OSError."""
    with open(path, "rb") as file:
        file.seek(offset)
        return parsed(file.readline().rstrip(b"\n"))


def spread_rows(path: Path, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (offset, row) of lines spread evenly over a file, without reading the rest. Raises OSError."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        last = -1
        for i in range(count):
            file.seek(max(0, size * i // count - 1))
            if i:
                file.readline(_PREVIEW_LINE_BYTES)
            offset = file.tell()
            row = parsed(file.readline(_PREVIEW_LINE_BYTES).rstrip(b"\n"))
            if row is not None and offset > last:
                last = offset
                yield offset, row


CACHED_BYTES = 16 << 20
"""Files of which less was read are read again instead."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError)
"""What a missing cache, or one of another release, raises."""
_STATE = "state.json"


class Columns:
    """Columns of equal length; what a row lacks is NaN in a column of floats and 0 in one of integers."""

    def __init__(self, dtype: str = "f4", dtypes: Mapping[str, str] | None = None) -> None:
        """`dtypes`: of the columns that have another one than `dtype`."""
        self._dtype, self._dtypes = dtype, dict(dtypes or {})
        self._parts: dict[str, list[np.ndarray]] = {}
        self._starts: dict[str, int] = {}
        self.num_rows = 0

    @property
    def names(self) -> list[str]:
        """Return the names in the order in which they appeared."""
        return list(self._parts)

    def append(self, names: Sequence[str], columns: Sequence[Any]) -> None:
        """Add rows, column by column; columns that are not named get what a row lacks."""
        num_rows = len(columns[0])
        given = dict(zip(names, columns, strict=True))
        for name in [*self._parts, *(name for name in names if name not in self._parts)]:
            if name not in self._parts:
                self._parts[name], self._starts[name] = [], self.num_rows
            column = given.get(name)
            self._parts[name].append(
                self._lacking(name, num_rows) if column is None else np.array(column, self._type(name))
            )
        self.num_rows += num_rows

    def _type(self, name: str) -> np.dtype[Any]:
        return np.dtype(self._dtypes.get(name, self._dtype))

    def _lacking(self, name: str, num_rows: int) -> np.ndarray:
        dtype = self._type(name)
        return np.full(num_rows, np.nan if dtype.kind == "f" else 0, dtype)

    def __getitem__(self, name: str) -> np.ndarray:
        """Return a column [num_rows]. Raises KeyError."""
        parts = self._parts[name]
        if self._starts[name]:
            parts.insert(0, self._lacking(name, self._starts[name]))
            self._starts[name] = 0
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts)]
        return parts[0] if parts else np.zeros(0, self._type(name))

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def save(self, folder: Path, state: Mapping[str, object]) -> None:
        """Write the columns and what they are of into a folder. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / _STATE).unlink(missing_ok=True)  # until all columns are written
        for number, name in enumerate(self.names):
            file = folder / f"{number}.npy"
            file.unlink(missing_ok=True)  # this or another studio may have mapped it
            np.save(file, self[name])
        new = folder / f"{_STATE}.new"
        new.write_text(json.dumps({"rows": self.num_rows, "names": self.names, "state": state}))
        new.replace(folder / _STATE)

    def load(self, folder: Path) -> dict[str, Any]:
        """Read columns that save() wrote; return what they are of. Raises UNREADABLE."""
        kept = json.loads((folder / _STATE).read_text())
        self.num_rows = kept["rows"]
        for number, name in enumerate(kept["names"]):
            column = np.load(folder / f"{number}.npy", mmap_mode="r")
            if column.shape != (self.num_rows,):
                raise ValueError(f"{folder}: a column of another length")
            self._parts[name], self._starts[name] = [column], 0
        state: dict[str, Any] = kept["state"]
        return state


def cache_folder(key: str) -> Path:
    """Return the folder of the cache for an index."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "slipstream" / "studio" / key
