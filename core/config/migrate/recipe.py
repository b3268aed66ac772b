"""Recipes of other systems as files: their values, and which system they are of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from core.config.migrate.table import System, flat, systems


def read(path: str | Path) -> dict[str, Any]:
    """Return the values of a YAML file by dotted key; empty for a file that is none. Numbers as 1e-6 are numbers."""
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return {key: _number(value) for key, value in flat(tree).items()} if isinstance(tree, Mapping) else {}


def system_of(recipe: Mapping[str, Any]) -> System | None:
    """Return the system that a flat recipe is of."""
    return next((system for system in systems() if system.is_of(recipe)), None)


def _number(value: Any) -> Any:
    """Return a text such as 1e-6, which YAML reads as text, as a number."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d+)?e[+-]?\d+", value, re.IGNORECASE):
        return float(value)
    return value
