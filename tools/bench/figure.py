"""The figures that measurements of `python -m tools.bench` yield."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A value beside what it is held against, and what was promised, as text."""

    name: str
    value: float
    unit: str
    baseline: float | None
    target: str
