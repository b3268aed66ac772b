"""Every rule across several keys, every warning, and a configuration that keeps the rules.

Those of keys alone stand beside the keys (core/config); what follows from the allocation and the models is added here.
A rule names the keys that it reads, so that a key that is wrong by itself is not reported twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from config_schema.section import Violation, broken_rules
from core.checks.facts import not_used, recomputation_warnings, unused_keys
from core.config.experiments import ExperimentConfig
from core.config.load import LoadedConfig, apply_overrides, load, tree_of
from core.config.parsing.problems import ConfigError
from core.config.parsing.yaml_tree import Scalar, Table
from core.placement.rules import check_allocation
from model_specs import hub


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


def load_config(
    experiment: str, source: str | Path | Table | None, overrides: Sequence[str] = (), *, weights: bool = False
) -> LoadedConfig:
    """Return the configuration of `experiment` (a key of EXPERIMENTS), with models of the hub as folders of the cache,
    and what the planner proposes in place of allocation_mode=search.

    `source`: a file, or its tree. `weights`: download their weights, too. Raises ConfigError with every problem there
    is."""

    def folder(given: str, reads_weights: bool) -> str:
        try:
            return hub.model_folder(given, weights=weights and reads_weights)
        except hub.HubError:
            return given  # reported with the other problems of models

    def loaded(more: Sequence[str]) -> LoadedConfig:
        return load(experiment, source, [*overrides, *more], check_rules, folder)

    try:
        return loaded([])
    except ConfigError as error:
        if not any(p.key == "allocation_mode" for p in error.problems) or not searches(source, overrides):
            raise
    from core.planning.choice import searched

    return loaded(searched(loaded))


def searches(source: str | Path | Table | None, overrides: Sequence[str]) -> bool:
    """Return whether allocation_mode is search."""
    tree = tree_of(source)
    apply_overrides(tree, overrides, [])
    mode = tree.children.get("allocation_mode")
    return isinstance(mode, Scalar) and mode.text == "search"
