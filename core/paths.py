"""Where a run writes, and that it is the only one that writes there. Every path of a run is under `fileroot`."""

from __future__ import annotations

import fcntl
import getpass
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PRIVATE = 0o077
"""Mask of new files and folders: prompts, answers and states are their owner's."""
RUNNING = ".running"
"""File in the log folder that a run holds a lock on."""


@dataclass(frozen=True, kw_only=True)
class RunPaths:
    """Output folders of one trial: `<fileroot>/<kind>/<user>/<experiment>/<trial>`."""

    logs: Path
    checkpoints: Path
    recover: Path

    @classmethod
    def for_trial(cls, fileroot: str, experiment_name: str, trial_name: str) -> RunPaths:
        """Return absolute paths; `~` in `fileroot` is the home folder."""
        root = Path(fileroot).expanduser().absolute()
        trial = Path(_user()) / experiment_name / trial_name
        return cls(
            logs=root / "logs" / trial, checkpoints=root / "checkpoints" / trial, recover=root / "recover" / trial
        )


def step_file(folder: Path, step: int) -> Path:
    """Return the file of a step that monitor.save_batches writes into `folder`; steps count from 1 as in the
    metrics."""
    return folder / f"step-{step}.json.gz"


@contextmanager
def private_files(paths: RunPaths) -> Iterator[None]:
    """Let files and folders of this trial, of this process and of those that it starts, be readable by their owner
    alone. The folders above those of the user, which several may share, keep the usual mode. Raises OSError."""
    for folder in (paths.logs, paths.checkpoints, paths.recover):
        folder.parents[2].mkdir(parents=True, exist_ok=True)
    before = os.umask(PRIVATE)
    try:
        for folder in (paths.logs, paths.recover):  # of an earlier release
            if folder.is_dir():
                folder.chmod(0o700)
        yield
    finally:
        os.umask(before)


class RunningError(ValueError):
    """Another run of the same trial is under way."""


@contextmanager
def sole_run(logs: Path, *, patience_seconds: float = 10.0) -> Iterator[None]:
    """Prevent other runs of the trial from starting inside the block. Raises RunningError where one is active; one that
    was just killed has `patience_seconds` to end."""
    logs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + patience_seconds
    with open(logs / RUNNING, "a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise RunningError(
                        f"trial_name={logs.name}: it is already running ({file.read().strip()}); wait for its end, "
                        "stop it, or choose another trial_name"
                    ) from None
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        return f"uid{os.getuid()}"
