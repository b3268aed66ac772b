"""`python -m tools.bench`: measurements, each beside its baseline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """A value beside what it is held against, and what was promised, as text."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    target: str = ""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The folder of the measurements, the interpreters that they may use, and the model of those on GPUs."""

    folder: Path
    trl_python: Path | None
    """Interpreter of an environment that has TRL."""
    sglang_python: Path | None
    """Interpreter that has SGLang; None: this one."""
    shape: str
    """Name of the model."""
    raw: dict[str, object]
    """Its config.json."""
