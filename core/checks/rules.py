"""Every rule across several keys, and every warning.

Those of keys alone stand beside the keys (core/config); what follows from the allocation and the models is added here.
A rule names the keys that it reads, so that a key that is wrong by itself is not reported twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from config_schema.section import Violation, broken_rules
from core.checks.facts import not_used, recomputation_warnings, unused_keys
from core.config.experiments import ExperimentConfig
from core.placement.rules import check_allocation


def check_rules(config: ExperimentConfig) -> Iterator[Violation]:
    """Yield every rule that `config` breaks."""
    yield from broken_rules(config)
    yield from check_allocation(config)


def config_warnings(config: ExperimentConfig, spelled: Callable[[str], str] = str) -> Iterator[str]:
    """Yield settings that are valid but probably not intended. `spelled`: (key) -> as the user wrote it."""
    unused: dict[str, list[str]] = {}
    for key, reason in unused_keys(config):
        unused.setdefault(reason, []).append(spelled(key))
    for reason, keys in unused.items():
        yield not_used(keys, reason)
    yield from config.warnings()
    yield from recomputation_warnings(config)
