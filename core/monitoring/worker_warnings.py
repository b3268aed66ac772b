"""Warnings and errors of worker processes on the terminal: read from their log files, which all nodes share.

Invariant: of many alike, the first few are shown, and later ones are counted; the log files have them all.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from pathlib import Path

logger = logging.getLogger(__name__)

_LINE = re.compile(r"\d{8}-\d\d:\d\d:\d\d\.\d{3} (?P<name>.+?) (?P<level>WARNING|ERROR|CRITICAL): (?P<message>.*)")
"""As core/monitoring/logs.py writes it."""
DRIVER_LOG = "master_worker.log"
_NUMBER = re.compile(r"\d+")
_MOST_ALIKE = 3
_MOST_KINDS = 50
_MAX_BYTES = 1 << 20
"""Read of one file at once; what is older is skipped."""


class WorkerWarnings:
    """Logs what the workers have warned of since the last call; lines of earlier runs are not shown."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = {path: path.stat().st_size for path in self._files()}
        self._seen: Counter[str] = Counter()

    def __call__(self) -> None:
        """Log the new warnings. Raises nothing: the files may be anywhere."""
        for path in self._files():
            try:
                lines = self._new_lines(path)
            except OSError:
                continue
            for line in lines:
                if found := _LINE.fullmatch(line):
                    self._show(found["name"], found["level"], found["message"])

    def _files(self) -> list[Path]:
        return sorted(path for path in self._folder.glob("*.log") if path.name != DRIVER_LOG)

    def _new_lines(self, path: Path) -> list[str]:
        begin, size = self._read.get(path, 0), path.stat().st_size
        if size <= begin:
            self._read[path] = size
            return []
        with open(path, "rb") as file:
            file.seek(max(begin, size - _MAX_BYTES))
            whole, newline, unfinished = file.read(size - file.tell()).rpartition(b"\n")
        self._read[path] = size - len(unfinished)
        return whole.decode(errors="replace").split("\n") if newline else []

    def _show(self, name: str, level: str, message: str) -> None:
        kind = f"{level} {_NUMBER.sub('#', message)[:200]}"
        if kind not in self._seen and len(self._seen) >= _MOST_KINDS:
            return
        self._seen[kind] += 1
        if self._seen[kind] > _MOST_ALIKE:
            return
        more = f" (more of these: see {self._folder})" if self._seen[kind] == _MOST_ALIKE else ""
        logger.log(getattr(logging, level), "%s: %s%s", name, message, more)
