"""A file of one JSON object a line, each of a step, that a recovered run continues without a gap or a repetition.

Invariant: every line is whole, and no step after the one that the run continues from is in the file twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.errors import could_not_write
from core.monitoring.histogram import Histogram


class Journal:
    """Appends rows; every row is with the system when write() returns, so a killed process loses none."""

    def __init__(self, path: Path, *, continue_after: int | None) -> None:
        """`continue_after`: rows of later steps are removed first, they will be written anew. None: all rows stay."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if continue_after is not None and path.exists():
            drop_later(path, continue_after)
        self._path = path
        # Without a buffer a row that found no room is not tried once more when the file is closed.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (open for the whole run)

    def write(self, step: int, row: Mapping[str, object]) -> None:
        """Append a row. Raises OSError, with the free disk space, if it cannot be written."""
        left = json.dumps({"step": step, **row}, default=_as_json).encode() + b"\n"
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise could_not_write(f"the row of step {step}", self._path, error) from error

    def close(self) -> None:
        self._file.close()


def _as_json(value: object) -> object:
    """Return what json.dumps writes for a histogram."""
    if isinstance(value, Histogram):
        return value.as_json()
    raise TypeError(f"a row holds numbers, lists and histograms, got {type(value).__name__}")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a journal, oldest first, without one that is being written. Raises OSError, and ValueError
    for a file that is no journal."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def drop_later(path: Path, step: int) -> bool:
    """Remove the rows of steps after `step`, and a row that was cut off, from a journal that is not open. Return
    whether there were any."""
    kept = path.with_name(f".{path.name}.kept")
    with open(path) as rows, open(kept, "w") as out:
        for row in rows:
            # A row that was cut off by a kill belongs to a step that was not committed.
            if row.endswith("\n") and json.loads(row)["step"] <= step:
                out.write(row)
    changed = kept.stat().st_size != path.stat().st_size
    os.rename(kept, path)
    return changed
