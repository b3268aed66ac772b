"""Columns of numbers that grow, and their copy in the cache of the user, so that a large file is read once.

The cache is `$XDG_CACHE_HOME/slipstream/studio`, by default below ~/.cache; folders of runs stay as they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
