"""The runs below the folders that the studio was given, and the files of a run.

Invariant: a file outside these folders is never opened, for no request, name or symbolic link.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from core.monitoring.health import History, Metrics
from core.monitoring.logs import DRIVER_LOG
from core.runs.paths import RUNNING
from core.runs.record import CONFIG, STARTS, settings_of
from tools.runs import history_of, state_of
from tools.studio.table import parsed

METRICS = "metrics.jsonl"
_DEPTH = 6
"""Levels of folders below a given one that are searched for runs, FILEROOT/logs/USER/EXPERIMENT/TRIAL and more."""
_WITHOUT_RUNS = ("checkpoints", "recover")
_SMALL_BYTES = 4 << 20
_TAIL_BYTES = 1 << 18
_STEP = re.compile(r"\(global step \d+\) finishes")
_LEFT = re.compile(r"Estimated remaining time: ([\d.]+)s")
_WARNING = re.compile(r" (WARNING|ERROR): (.*)")


class NotFound(LookupError):
    """A request names a run or a file that is not there."""


@dataclass(frozen=True)
class Run:
    """A run, by its log folder."""

    id: str
    name: str
    logs: Path

    @property
    def state(self) -> str:
        """running, complete or stopped."""
        return "stopped" if self._is_odd(RUNNING) else state_of(self.logs)

    @property
    def small(self) -> bool:
        """Whether its metrics are read in a moment."""
        with suppress(NotFound):
            return self.path(METRICS).stat().st_size < _SMALL_BYTES
        return False

    def path(self, name: str) -> Path:
        """Return the path of a regular file of the run, which may lie in a folder of it. Raises NotFound."""
        path = self.logs / name
        try:
            real = path.resolve(strict=True)
        except (OSError, ValueError):
            raise NotFound(f"{self.name}: no file {name}") from None
        if not real.is_relative_to(self.logs.resolve()) or not stat.S_ISREG(real.stat().st_mode):
            raise NotFound(f"{self.name}: {name} is no file of the run")
        return real

    def open(self, name: str) -> IO[bytes]:
        """Open a file of the run for reading. Raises NotFound."""
        return open(self.path(name), "rb")

    @property
    def settings(self) -> dict[str, object]:
        """The configuration by dotted key; empty where it cannot be read."""
        with suppress(NotFound):
            self.path(CONFIG)
            return settings_of(self.logs)
        return {}

    def history(self, metrics: Metrics) -> History:
        """Return what the rules of health read."""
        if self._is_odd(CONFIG) or self._is_odd(STARTS):
            return History(metrics)
        return history_of(self.logs, metrics)

    def _is_odd(self, name: str) -> bool:
        """Return whether a file is a link, a pipe or a device: no run writes one, and opening a pipe would hang."""
        with suppress(OSError):
            return not stat.S_ISREG((self.logs / name).lstat().st_mode)
        return False

    def files(self, pattern: str) -> list[Path]:
        """Return the regular files of the run that match a pattern, by name."""
        found = []
        for path in sorted(self.logs.glob(pattern)):
            with suppress(NotFound):
                found.append(self.path(path.relative_to(self.logs).as_posix()))
        return found


class Folders:
    """The given folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._roots = [folder.expanduser().resolve() for folder in folders]
        self._runs: dict[str, Run] = {}

    def runs(self) -> list[Run]:
        """Search the folders again; return their runs, the newest first."""
        found = {logs: None for root in self._roots for logs in _logs_below(root, _DEPTH)}
        self._runs = {run.id: run for run in map(_run, found)}
        return sorted(self._runs.values(), key=lambda run: _changed(run.logs), reverse=True)

    def holds(self, path: Path) -> bool:
        """Return whether a path, with symbolic links followed, lies in one of the folders."""
        return any(path.resolve().is_relative_to(root) for root in self._roots)

    def run(self, id: str) -> Run:
        """Return a run by its id. Raises NotFound."""
        if id not in self._runs:
            self.runs()
        try:
            return self._runs[id]
        except KeyError:
            raise NotFound("there is no such run; reload the list of runs") from None


def _run(logs: Path) -> Run:
    id = hashlib.blake2b(os.fsencode(logs), digest_size=6).hexdigest()
    return Run(id=id, name=f"{logs.parent.name}/{logs.name}", logs=logs)


def _logs_below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield log folders at or below `folder`. Symbolic links are not followed."""
    try:
        entries = {entry.name: entry for entry in os.scandir(folder)}
    except OSError:
        return
    if METRICS in entries or STARTS in entries:
        yield folder
    elif depth:
        for name in sorted(entries):
            if entries[name].is_dir(follow_symlinks=False) and not name.startswith(".") and name not in _WITHOUT_RUNS:
                yield from _logs_below(folder / name, depth - 1)


def _changed(logs: Path) -> float:
    with suppress(OSError):
        return max(p.stat().st_mtime for p in (logs / METRICS, logs / STARTS, logs) if p.exists())
    return 0.0


def tail(run: Run, name: str, *, most: int = _TAIL_BYTES) -> list[str]:
    """Return the last whole lines of a text file of the run. Raises NotFound."""
    with run.open(name) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - most))
        lines = file.read(most).decode("utf-8", "replace").split("\n")
    return [line for line in lines[1 if size > most else 0 :] if line]


def last_row(run: Run) -> dict[str, Any]:
    """Return the last row of a step that can be read; empty before the first."""
    with suppress(NotFound):
        for line in reversed(tail(run, METRICS)):
            row = parsed(line.encode())
            if row is not None and "time/step" in row:
                return row
    return {}


def log_figures(run: Run) -> tuple[str, float | None]:
    """Return the last warning of the driver and the seconds that it expects to need; empty and None where there is
    none."""
    warning, left = "", None
    with suppress(NotFound):
        for line in reversed(tail(run, DRIVER_LOG)):
            if left is None and _STEP.search(line):
                found = _LEFT.search(line)
                left = float(found[1]) if found else -1.0
            if not warning and (said := _WARNING.search(line)):
                warning = said[2]
            if warning and left is not None:
                break
    return warning, left if left is not None and left >= 0 else None
