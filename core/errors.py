"""Errors that more than one part of core names, importable without Ray or torch."""

import errno
import shutil
from pathlib import Path
from typing import TypeGuard

from rollout.plugins import clarify, user_place


class LaunchError(RuntimeError):
    """The cluster could not be started, or a worker of it exited or did not answer. The message names it."""


class PushFailure(LaunchError):
    """A weight push failed in the trainer's ranks. The message names the server, or the rank, and the cause."""

    servers: tuple[str, ...] = ()
    """Generators whose servers did not take what was sent; empty where the trainer failed."""

    def __init__(self, message: str, *, servers: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.servers = servers


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without a full stop at its end, which the sentence around it has, or
    the error's type if it has none."""
    line = str(error).strip().partition("\n")[0].rstrip()
    return (line if line.endswith("..") else line.removesuffix("."))[:500] or type(error).__name__


def what_user_code_raised(error: BaseException, log: Path) -> str:
    """Return the message of an error that passed through a user's reward, workflow or algorithm, with the place in the
    user's file and the log that has the traceback; empty where no such file is in its traceback. That of a worker is in
    the notes."""
    while isinstance(error, BaseExceptionGroup):  # the last one that passed through such a file
        passed = [e for e in error.exceptions if user_place(e)]
        error = (passed or error.exceptions)[-1]
    place = user_place(error)
    if not place:
        return ""
    clarify(error)
    message = str(error).strip()
    if not message or not isinstance(error, ValueError | OSError | RuntimeError | MemoryError):
        message = f"{type(error).__name__}: {message}".removesuffix(": ")  # a KeyError's message is the key alone
    return f"{message} ({place}; traceback: {log})"


def is_of_disk(error: BaseException) -> TypeGuard[OSError]:
    """Return whether files are the reason, which new processes would meet again. An error about another process that
    has exited, or is late, is an OSError as well."""
    return isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError)


def could_not_write(what: str, path: Path, error: Exception) -> OSError:
    """Return the error to raise when writing failed, with the free disk space: a library may hide a full disk behind an
    error of its own."""
    folder = path if path.is_dir() else path.parent
    left, way_out = "", "free disk space or set external_configs.cluster_config.fileroot to a larger disk"
    if not folder.exists():
        way_out = f"{folder} does not exist any more: start the run again, or restore the folder"
    elif isinstance(error, PermissionError | NotADirectoryError) or getattr(error, "errno", None) == errno.EROFS:
        way_out = "set external_configs.cluster_config.fileroot to a folder that you may write"
    else:
        left = f" ({shutil.disk_usage(folder).free / 2**20:.1f} MiB left on its disk)"
    return OSError(
        f"{what} could not be written to {path}{left}: {error}. Earlier recover checkpoints are not affected; {way_out}"
    )
