"""Recipes of other systems as files: their values, and which system they are of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from core.config.migrate.table import System, flat, systems


def read(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values of a YAML file by dotted key, with overrides `KEY=VALUE`; empty for a file that is none.
    Numbers as 1e-6 are numbers. Raises ValueError for an override that cannot be read."""
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    if not isinstance(tree, Mapping):
        return {}
    for override in overrides:
        tree = _overridden(tree, override)
    return {key: _number(value) for key, value in flat(tree).items()}


def _overridden(tree: Mapping[str, Any], override: str) -> dict[str, Any]:
    """Return a recipe with one more value, which `+` or `++` may precede."""
    key, equals, text = override.lstrip("+").partition("=")
    if not equals or key.startswith("~"):
        raise ValueError(f"{override!r}: write KEY=VALUE")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"{override!r}: the value is not valid YAML") from None
    return _with(tree, key.split("."), value)


def _with(tree: Any, names: Sequence[str], value: Any) -> dict[str, Any]:
    section = dict(tree) if isinstance(tree, Mapping) else {}
    first, *rest = names
    section[first] = _with(section.get(first), rest, value) if rest else value
    return section


def system_of(recipe: Mapping[str, Any]) -> System | None:
    """Return the system that a flat recipe is of."""
    return next((system for system in systems() if system.is_of(recipe)), None)


def _number(value: Any) -> Any:
    """Return a text such as 1e-6, which YAML reads as text, as a number."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d+)?e[+-]?\d+", value, re.IGNORECASE):
        return float(value)
    return value
