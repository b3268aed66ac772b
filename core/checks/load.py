"""A configuration that keeps every rule, those of its allocation included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from core.checks.rules import check_rules
from core.config.load import LoadedConfig, load


def load_config(experiment: str, path: str | Path | None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Return the configuration of `experiment` (a key of EXPERIMENTS). Raises ConfigError with every problem there
    is."""
    return load(experiment, path, overrides, check_rules)
