"""Typed reading of single values of a config.json. Bottom of this package.

Invariant: what is returned has the type and range of the function's name; everything else is a ModelConfigError with
key and value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

RawConfig = Mapping[str, object]
"""A decoded config.json, or an object in it: no value has been checked."""


class ModelConfigError(ValueError):
    """A config.json that cannot be read or that describes a model outside the supported families."""


def positive(raw: RawConfig, key: str, default: int | None = None, *, least: int = 1, most: int = 1 << 31) -> int:
    """Return an integer from `least` to `most`. `default`, if any, stands for a key that is absent or null."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < least:
        allowed = "a positive integer" if least == 1 else f"an integer from {least}"
        raise ModelConfigError(f"{key}={value!r} must be {allowed}")
    if value > most:
        raise ModelConfigError(f"{key}={value} must be at most {most}")
    return value


def optional(raw: RawConfig, key: str, default: int) -> int | None:
    """Return a positive integer, or None for null. `default` stands for a key that is absent."""
    value = raw.get(key, default)
    return None if value is None else positive({key: value}, key)


def num_layers(raw: RawConfig) -> int:
    """Return num_hidden_layers, up to what no model exceeds: lists of this length are made."""
    return positive(raw, "num_hidden_layers", most=1000)


def number(values: RawConfig, key: str, default: float) -> float:
    """Return a finite number. `default` stands for a key that is absent or null."""
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelConfigError(f"{key}={value!r} must be a number")
    return float(value)


def boolean(raw: RawConfig, key: str, default: bool) -> bool:
    """Return true or false. `default` stands for a key that is absent."""
    value = raw.get(key, default)
    if type(value) is not bool:
        raise ModelConfigError(f"{key}={value!r} must be true or false")
    return value


def positive_number(values: RawConfig, key: str, default: float) -> float:
    """Return a number above 0. `default` stands for a key that is absent or null."""
    value = number(values, key, default)
    if value <= 0:
        raise ModelConfigError(f"{key}={value!r} must be a number above 0")
    return value


def json_object(raw: RawConfig, key: str) -> RawConfig:
    """Return the json object at `key`; empty where it is absent or null."""
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelConfigError(f"{key}={value!r} must be a json object")
    return value


def require(raw: RawConfig, expected: RawConfig) -> None:
    """Raise ModelConfigError unless every key of `expected` is absent, null, or has that value."""
    for key, value in expected.items():
        if raw.get(key, value) not in (value, None):
            raise ModelConfigError(f"{key}={raw[key]!r} is not supported; only {value!r}")
