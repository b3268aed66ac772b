"""samples.jsonl and the files before it, samples-000001.jsonl ... in the order in which they were written.

Invariant: the files hold whole rows in the order of their steps, and no step twice after a recovery.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from core.monitoring.journal import Journal, drop_later, read_rows
from core.monitoring.samples import Sample

_CURRENT = "samples.jsonl"
_CLOSED = re.compile(r"samples-(\d{6,})\.jsonl")


class SampleFile:
    """Appends samples; a file that has `max_bytes` is closed under a number, and the oldest ones beyond `keep` files
    are deleted."""

    def __init__(self, folder: Path, *, continue_after: int, max_bytes: int, keep: int) -> None:
        """Rows of steps after `continue_after` are removed first."""
        self._path, self._max_bytes, self._keep = folder / _CURRENT, max_bytes, keep
        for closed in reversed(closed_files(folder)):
            if not drop_later(closed, continue_after):
                break  # earlier files have earlier steps
            if not closed.stat().st_size:
                closed.unlink()
        self._journal = Journal(self._path, continue_after=continue_after)

    def write(self, samples: Iterable[Sample]) -> None:
        """Append the samples of a step. Raises OSError, with the free disk space, if they cannot be written."""
        if self._path.stat().st_size >= self._max_bytes:
            self._begin_another()
        for sample in samples:
            self._journal.write(sample.step, sample.to_row())

    def close(self) -> None:
        self._journal.close()

    def _begin_another(self) -> None:
        self._journal.close()
        closed = closed_files(self._path.parent)
        number = _number(closed[-1]) + 1 if closed else 1
        self._path.rename(self._path.with_name(f"samples-{number:06d}.jsonl"))
        for old in closed_files(self._path.parent)[: -(self._keep - 1) or None]:
            old.unlink()
        self._journal = Journal(self._path, continue_after=None)


def closed_files(folder: Path) -> list[Path]:
    """Return the closed files of a folder, oldest first."""
    return sorted((p for p in folder.glob("samples-*.jsonl") if _CLOSED.fullmatch(p.name)), key=_number)


def read_samples(folder: Path) -> Iterator[Sample]:
    """Yield the samples of a run's log folder, oldest first. Raises FileNotFoundError if there are none, and ValueError
    for a file of something else."""
    for path in [*closed_files(folder), folder / _CURRENT]:
        try:
            for row in read_rows(path):
                yield Sample.from_row(row)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a file of samples: {error}") from error


def _number(path: Path) -> int:
    found = _CLOSED.fullmatch(path.name)
    assert found, "only closed files have a number"
    return int(found[1])
