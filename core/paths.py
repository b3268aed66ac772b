"""Where a run writes. Every path of a run is under `fileroot`; nothing is created here."""

from __future__ import annotations

import getpass
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RunPaths:
    """Output folders of one trial: `<fileroot>/<kind>/<user>/<experiment>/<trial>`."""

    logs: Path
    checkpoints: Path
    recover: Path

    @classmethod
    def for_trial(cls, fileroot: str, experiment_name: str, trial_name: str) -> RunPaths:
        """Absolute paths; `~` in `fileroot` is the home folder."""
        root = Path(fileroot).expanduser().absolute()
        trial = Path(_user()) / experiment_name / trial_name
        return cls(
            logs=root / "logs" / trial, checkpoints=root / "checkpoints" / trial, recover=root / "recover" / trial
        )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        return f"uid{os.getuid()}"
