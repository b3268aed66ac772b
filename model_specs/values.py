"""Typed reading of single values of a config.json. Bottom of this package.

Invariant: what is returned has the type and range of the function's name; everything else is a ModelConfigError with
key and value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class ModelConfigError(ValueError):
    """A config.json that cannot be read or that describes a model outside the supported families."""


def positive(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer. `default` stands for a key that is absent or null; None: there is no default."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or value < 1:
        raise ModelConfigError(f"{key}={value!r} must be a positive integer")
    return value


def number(values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float):
        raise ModelConfigError(f"{key}={value!r} must be a number")
    return float(value)


def positive_number(values: Mapping[str, Any], key: str, default: float) -> float:
    """Return a number above 0. `default` stands for a key that is absent or null."""
    value = number(values, key, default)
    if not 0 < value < math.inf:
        raise ModelConfigError(f"{key}={value!r} must be a number above 0")
    return value


def json_object(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the json object at `key`; empty where it is absent or null."""
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelConfigError(f"{key}={value!r} must be a json object")
    return value


def require(raw: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise ModelConfigError unless every key of `expected` is absent, null, or has that value."""
    for key, value in expected.items():
        if raw.get(key, value) not in (value, None):
            raise ModelConfigError(f"{key}={raw[key]!r} is not supported; only {value!r}")
