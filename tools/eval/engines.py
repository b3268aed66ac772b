"""The engines of a recover checkpoint: one folder each, and which of them is taken if none is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ENGINE_NAMES = "actor or critic of a PPO run, default of an SFT or DPO run"
"""What users can choose from, for help texts."""
CRITIC = "critic"
_PREFERRED = "actor"


def engine_folders(checkpoint: Path) -> dict[str, Path]:
    """Return name -> folder of the engines of a recover checkpoint; empty for any other folder."""
    return {path.parent.name: path.parent for path in sorted(checkpoint.glob("*/metadata.json"))}


def default_engine(engines: Mapping[str, Path]) -> str | None:
    """Return the only engine, or the actor of several. None: there is no engine, or no actor among several."""
    if len(engines) == 1:
        return next(iter(engines))
    return _PREFERRED if _PREFERRED in engines else None
