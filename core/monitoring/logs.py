"""Log lines in the format of the AReaL tutorial: `20250222-10:26:34.877 quickstart INFO: message`.

Warnings and errors of worker processes come from their log files, which all nodes share, to the terminal: of many
alike, the first few are shown, and later ones are counted.
"""

import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import IO

from rich.console import Console

from core.processes.stacks import register_process
from core.runs.paths import PRIVATE
from tracing import record_worker

logger = logging.getLogger(__name__)

LEVEL = "SLIPSTREAM_LOG_LEVEL"
"""Environment variable of worker processes: monitor.log_level."""

NOTICE = {"notice": True}
"""`extra` of a record of level info that a compact terminal shows, too."""

_PACKAGES = ("allocation", "config_schema", "core", "mcore_adapter", "model_specs", "rollout", "tools")


class LineFormatter(logging.Formatter):
    """`{date}-{time}.{milliseconds} {speaker} {level}: {message}`. The command line logs as quickstart, every other
    module of a process as `name`. Tracebacks follow their line, unless `tracebacks` is false."""

    def __init__(self, name: str, *, tracebacks: bool = True) -> None:
        super().__init__()
        self._name = name
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%Y%m%d-%H:%M:%S.%f")[:-3]
        speaker = record.name if record.name == "quickstart" else self._name
        line = f"{when} {speaker} {record.levelname}: {record.getMessage()}"
        if record.exc_info and self._tracebacks:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _ShortFormatter(logging.Formatter):
    """A line for a terminal that shows rows of steps: what it is about, without time and process."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{level}{record.getMessage()}"


def _is_for_people(record: logging.LogRecord) -> bool:
    """Return whether a record is a warning, an error, or information that is marked for the terminal."""
    return record.levelno >= logging.WARNING or getattr(record, "notice", False)


class _TerminalHandler(logging.Handler):
    """Above the progress bar, and a line stays a line: the terminal may wrap it, rich's own handler would cut it up."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            style = {logging.WARNING: "yellow", logging.ERROR: "red"}.get(record.levelno)
            line = self.format(record)
            self._console.print(line, style=style, soft_wrap=True, markup=False, highlight=False, emoji=False)
        except OSError:  # the terminal was closed: the run goes on without it, and so does the progress bar
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._console.file.fileno())


def log_to_file(name: str, path: str) -> None:
    """Send all output of this process to `path`: log records, and what libraries write to stdout and stderr. From then
    on the process writes its stacks on request, and records its spans."""
    os.umask(PRIVATE)  # a joined Ray cluster started this process with another
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    register_process(name, Path(path).parent)
    record_worker(name, Path(path).parent)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    handler = logging.StreamHandler(os.fdopen(os.dup(2), "w", buffering=1))
    handler.setFormatter(LineFormatter(name))
    _start_logging([handler], os.environ.get(LEVEL, "info"))


def _start_logging(handlers: list[logging.Handler], level: str) -> None:
    """Send records to `handlers`: info and above, with level=debug those of this project's packages too. Debug records
    of libraries would hide them."""
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.getLogger("torch").setLevel(logging.WARNING)  # its compiler logs statistics when a process ends
    logging.getLogger("megatron.core.distributed").setLevel(logging.WARNING)  # it names what a run does not use
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(logging.DEBUG if level == "debug" else logging.NOTSET)


@contextmanager
def kept_records(*names: str) -> Iterator[list[logging.LogRecord]]:
    """Yield a list that the records of these loggers, info and above, go into before there are handlers for them.
    Handlers that are there already get none of them: the caller handles the records later, once."""
    loggers, records = [logging.getLogger(name) for name in names], BufferingHandler(sys.maxsize)
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(records)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield records.buffer
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(records)
            logger.setLevel(level)
            logger.propagate = propagate


class _OutputHandler(logging.StreamHandler[IO[str]]):
    """Writes to a terminal, file or pipe. One that takes no more lines does not end a run, which has its log file."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name is logging's)
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def worker_environment() -> dict[str, str]:
    """Return the variables that give a worker process the log level of this one."""
    return {LEVEL: "debug" if logging.getLogger(__name__).isEnabledFor(logging.DEBUG) else "info"}


def log_to_terminal(path: Path | None, *, level: str, console: Console, compact: bool = False) -> None:
    """Set up the driver's log: plain lines of `level` and above on the terminal (above the progress bar, if there is
    one) and, with tracebacks, of info and above in the file at `path`. `compact`: the terminal gets warnings, errors
    and NOTICE alone, in a short form."""
    terminal = _TerminalHandler(console) if console.is_terminal else _OutputHandler(console.file)
    terminal.setFormatter(LineFormatter("master worker", tracebacks=False))
    terminal.setLevel(level.upper())
    if compact:
        terminal.setFormatter(_ShortFormatter())
        terminal.addFilter(_is_for_people)
    handlers: list[logging.Handler] = [terminal]
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(path)
        file.setFormatter(LineFormatter("master worker"))
        handlers.append(file)
    _start_logging(handlers, level)


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
