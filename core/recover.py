"""Recover checkpoints: the whole run in one folder, visible only when complete.

    {fileroot}/recover/<user>/<experiment>/<trial>/globalstep{N}/
                                          {engine}/   the trainer's distributed checkpoint, one folder an engine
                                          rollout.pkl data cursor, buffer, prompts in flight
                                          run.json    step, version, and the settings that must not change

A checkpoint is written into a temporary folder beside its place and committed by one rename; the two newest are kept.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_NAME = re.compile(r"globalstep(\d+)")
_KEEP = 2


class RecoverError(ValueError):
    """A checkpoint cannot be used with this configuration."""


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What must be the same for a run to continue (the rules of the tutorial: batch size, group size, nodes)."""

    train_bs_n_seqs: int
    group_size: int
    n_nodes: int


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The driver's own state after `step` finished steps; `version` is the version of the trainer's weights."""

    step: int
    version: int
    elapsed_seconds: float
    extra: dict[str, object]


class RecoverStore:
    """Writes and finds the recover checkpoints of one trial."""

    def __init__(self, folder: Path, identity: RunIdentity) -> None:
        self._folder = folder
        self._identity = identity

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        found = self._checkpoints()
        return found[-1] if found else None

    def _checkpoints(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        named = [(int(m[1]), p) for p in self._folder.iterdir() if (m := _NAME.fullmatch(p.name))]
        return [p for _, p in sorted(named)]

    def dump(self, state: RunState, rollout_state: object, save_engines: Callable[[Path], None]) -> Path:
        """Write one checkpoint and drop all but the two newest. `save_engines(folder)` writes the trainer's part.

        Raises OSError, with the space left, when that fails: nothing half-written stays, older checkpoints are as they
        were."""
        target = self._folder / f"globalstep{state.step}"
        temporary = self._folder / f".writing-globalstep{state.step}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            save_engines(temporary)
            with open(temporary / "rollout.pkl", "wb") as f:
                pickle.dump(rollout_state, f, protocol=pickle.HIGHEST_PROTOCOL)
                _sync(f)
            with open(temporary / "run.json", "w") as f:
                json.dump({"identity": asdict(self._identity), "state": asdict(state)}, f)
                _sync(f)
            if target.exists():
                shutil.rmtree(target)
            os.rename(temporary, target)
        except (OSError, RuntimeError) as error:
            # A writer inside a library may hide a full disk behind an error of its own: say what is left.
            free_mib = shutil.disk_usage(self._folder).free / 2**20
            raise OSError(
                f"the recover checkpoint of step {state.step} could not be written to {self._folder} "
                f"({free_mib:.1f} MiB left on its disk): {error}. Older checkpoints are as they were; make room or set "
                "external_configs.cluster_config.fileroot to a larger disk"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for old in self._checkpoints()[:-_KEEP]:
            shutil.rmtree(old, ignore_errors=True)
        logger.info("Dumped recover info to file.")
        return target

    def load(self, checkpoint: Path) -> tuple[RunState, object]:
        """The driver's and the rollout's state. Raises RecoverError if the configuration changed in a way that the
        checkpoint cannot follow."""
        with open(checkpoint / "run.json") as f:
            saved = json.load(f)
        for key, now in asdict(self._identity).items():
            before = saved["identity"][key]
            if before != now:
                raise RecoverError(
                    f"{key}={now}: the checkpoint {checkpoint} was written with {key}={before}, which must not change; "
                    f"set {key}={before} again, or start anew with another trial_name or recover_mode=disabled"
                )
        with open(checkpoint / "rollout.pkl", "rb") as f:
            rollout_state = pickle.load(f)
        return RunState(**saved["state"]), rollout_state


def _sync(f) -> None:
    f.flush()
    os.fsync(f.fileno())
