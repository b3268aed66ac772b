"""Earlier runs: those of the same trial, which a new run must neither mix with nor overwrite, and trials of a similar
name. Standard library only, as this happens before anything is started.
"""

from __future__ import annotations

import difflib
from datetime import datetime
from pathlib import Path
from typing import Protocol

from core.paths import RUNNING, RunPaths

_METRICS = "metrics.jsonl"
_MARKER = "COMMITTED"
"""What appears last in a recover checkpoint (core/recovery/manifest.py)."""
_PUSHED = "push"
"""In the folder of the models: weights on their way to the generators."""


class RecoverKeys(Protocol):
    """What the configuration of a run decides about its start."""

    @property
    def recovers(self) -> bool: ...

    @property
    def recover_mode(self) -> str: ...


def begins_anew(keys: RecoverKeys, paths: RunPaths) -> bool:
    """Return whether a run of this trial would begin at the first step where an earlier run has left results."""
    if keys.recovers and (keys.recover_mode == "resume" or has_checkpoint(paths.recover)):
        return False
    return bool(_results(paths))


def has_checkpoint(recover: Path) -> bool:
    """Return whether a trial, by its folder `recover`, has a recover checkpoint that was written to its end."""
    return bool(_checkpoints(recover))


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a recover checkpoint that was written to its end."""
    return (folder / _MARKER).exists()


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


def near_trials(recover: Path) -> list[str]:
    """Return the trials of the user, as experiment/trial, that have a recover checkpoint and a name like that of the
    folder `recover`; the most similar first."""
    user = recover.parent.parent
    others = [trial for trial in user.glob("*/*") if trial != recover and has_checkpoint(trial)]
    names = [f"{trial.parent.name}/{trial.name}" for trial in others]
    return difflib.get_close_matches(f"{recover.parent.name}/{recover.name}", names, n=3, cutoff=0.6)


def named_near_trials(recover: Path) -> str:
    """Return near_trials() as a message names them, in brackets; empty where there are none."""
    near = near_trials(recover)
    return f" (trials with one: {', '.join(near)})" if near else ""


def _free_name(paths: RunPaths, stamp: str) -> RunPaths:
    """Return folders that do not exist, named after the trial and the time."""
    number = 1
    while True:
        ending = f".{stamp}" if number == 1 else f".{stamp}-{number}"
        found = RunPaths(
            logs=paths.logs.with_name(paths.logs.name + ending),
            checkpoints=paths.checkpoints.with_name(paths.checkpoints.name + ending),
            recover=paths.recover.with_name(paths.recover.name + ending),
        )
        if not any(path.exists() for path in (found.logs, found.checkpoints, found.recover)):
            return found
        number += 1


def _results(paths: RunPaths) -> list[Path]:
    """Return what an earlier run has left that is worth keeping."""
    metrics = paths.logs / _METRICS
    found = [metrics] if metrics.exists() and metrics.stat().st_size else []
    if paths.checkpoints.exists():
        found += [model for model in paths.checkpoints.glob("*/*") if model.parent.name != _PUSHED]
    return found + _checkpoints(paths.recover)


def _checkpoints(recover: Path) -> list[Path]:
    return list(recover.glob(f"globalstep*/{_MARKER}"))
