"""Where a run writes, and that it neither mixes with another run of its trial nor overwrites one. Every path of a run
is under `fileroot`. This happens before anything is started.
"""

import fcntl
import getpass
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Self

from core.config.common import CommonExperimentConfig
from core.runs.checkpoints import committed, has_checkpoint

PRIVATE = 0o077
"""Mask of new files and folders: prompts, answers and states are their owner's."""
RUNNING = ".running"
"""File in the log folder that a run holds a lock on."""
QUESTIONS = "questions.json"
"""File in the log folder with port and key, while a run answers questions."""
_METRICS = "metrics.jsonl"
_PUSHED = "push"
"""In the folder of the models: weights on their way to the generators."""


@dataclass(frozen=True, kw_only=True)
class RunPaths:
    """Output folders of one trial: `<fileroot>/<kind>/<user>/<experiment>/<trial>`."""

    logs: Path
    checkpoints: Path
    recover: Path

    @classmethod
    def of(cls, config: CommonExperimentConfig) -> Self:
        """Return the folders of the trial of a configuration."""
        fileroot = config.external_configs.cluster_config.fileroot
        return cls.for_trial(fileroot, config.experiment_name, config.trial_name)

    @classmethod
    def for_trial(cls, fileroot: str, experiment_name: str, trial_name: str) -> Self:
        """Return absolute paths; `~` in `fileroot` is the home folder."""
        root = Path(os.path.expanduser(fileroot)).absolute()
        return cls._below(root, Path(_user()) / experiment_name / trial_name)

    @classmethod
    def of_folder(cls, folder: Path) -> Self | None:
        """Return the folders of the trial of which `folder` is one; None for any other folder."""
        parts = folder.expanduser().absolute().parts
        if len(parts) < 5 or parts[-4] not in ("logs", "checkpoints", "recover"):
            return None
        return cls._below(Path(*parts[:-4]), Path(*parts[-3:]))

    @property
    def experiment(self) -> str:
        return self.logs.parent.name

    @property
    def trial(self) -> str:
        return self.logs.name

    @property
    def root(self) -> Path:
        """The fileroot."""
        return self.logs.parents[3]

    @classmethod
    def _below(cls, root: Path, trial: Path) -> Self:
        return cls(**{kind: root / kind / trial for kind in ("logs", "checkpoints", "recover")})


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


def begins_anew(config: CommonExperimentConfig, paths: RunPaths) -> bool:
    """Return whether a run of this trial would begin at the first step where an earlier run has left results."""
    if config.recovers and (config.must_recover or has_checkpoint(paths.recover)):
        return False
    return bool(_results(paths))


def set_aside(paths: RunPaths) -> RunPaths:
    """Give the earlier run of a trial a dated trial name: its logs, models and recover checkpoints. Return its folders.
    Call it inside sole_run(). Raises OSError."""
    newest = max(found.stat().st_mtime for found in _results(paths))
    aside = _free_name(paths, datetime.fromtimestamp(newest).strftime("%Y%m%d-%H%M%S"))
    for source, target in ((paths.checkpoints, aside.checkpoints), (paths.recover, aside.recover)):
        if source.exists():
            source.rename(target)
    # Not the folder itself: it holds the lock of sole_run().
    aside.logs.mkdir(exist_ok=True)
    for entry in [entry for entry in paths.logs.iterdir() if entry.name != RUNNING]:
        entry.rename(aside.logs / entry.name)
    return aside


def _free_name(paths: RunPaths, stamp: str) -> RunPaths:
    """Return folders that do not exist, named after the trial and the time."""
    for number in count(1):
        ending = f".{stamp}" if number == 1 else f".{stamp}-{number}"
        folders = {kind: path.with_name(path.name + ending) for kind, path in asdict(paths).items()}
        if not any(path.exists() for path in folders.values()):
            break
    return RunPaths(**folders)


def _results(paths: RunPaths) -> list[Path]:
    """Return what an earlier run has left that is worth keeping."""
    metrics = paths.logs / _METRICS
    found = [metrics] if metrics.exists() and metrics.stat().st_size else []
    if paths.checkpoints.exists():
        found += [model for model in paths.checkpoints.glob("*/*") if model.parent.name != _PUSHED]
    return found + committed(paths.recover)


def _user() -> str:
    """Return the user's name, or number where there is no name that can be part of a path: LOGNAME may hold anything,
    and a container may run under a number without a name."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = ""
    return name if re.fullmatch(r"\w[\w.@+-]*", name) else f"uid{os.getuid()}"
