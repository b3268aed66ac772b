"""`python -m tools.bench`: measurements, each beside its baseline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TRL_SCRIPT = Path(__file__).with_name("trl_script.py")
"""Runs in an environment that has TRL."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A value beside what it is held against, and what was promised, as text."""

    name: str
    value: float
    unit: str
    baseline: float | None
    target: str
