"""From a configuration to the algorithm of a run, and the options of one of the user. Loads torch with the algorithm
alone: the checks of a configuration import this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from config_schema.section import Section
from core.config.algorithm import AlgorithmSettings, needs_group
from core.config.experiments import EXPERIMENTS, PPOMATHConfig
from core.config.load import bind
from core.config.parsing.problems import ConfigError, Problem
from core.config.presets import PRESETS
from rollout.plugins import PluginError, load_plugin, unknown_name

if TYPE_CHECKING:
    from core.algorithms.base import Algorithm


POLICY_GRADIENT = "core.algorithms.policy_gradient:PolicyGradient"
"""module:class of all PRESETS; it takes (AlgorithmSettings, options) and has the attributes of base.Algorithm."""


def load_algorithm(name: str) -> Callable[[AlgorithmSettings, object], Algorithm]:
    """Return the class of an algorithm: a key of PRESETS or package.module:Class. Imports torch. Raises
    PluginError."""
    found: Callable[[AlgorithmSettings, object], Algorithm] = load_plugin(
        POLICY_GRADIENT if name in PRESETS else name, kind="algorithm", arguments=("settings", "options")
    )
    return found


def build_algorithm(config: PPOMATHConfig) -> Algorithm:
    """Return the algorithm of this run. Imports torch. Raises ValueError for a name or options that do not exist."""
    options = own_options(config)
    return load_algorithm(config.algorithm_name)(
        config.algorithm_settings, config.algorithm.options if options is None else options
    )


def own_options(config: PPOMATHConfig) -> Section | None:
    """Return algorithm.options as the `Config` of the algorithm; None where it has none. Raises ConfigError with every
    problem there is."""
    own: type[Section] | None = getattr(load_algorithm(config.algorithm_name), "Config", None)
    return None if own is None else bind(own, config.algorithm.options, "algorithm.options.")


def check_algorithm(config: PPOMATHConfig) -> Iterator[Problem]:
    """Yield what is wrong with algorithm.*; only an algorithm of the user is imported, and torch with it."""
    name = config.own_algorithm
    if name is None:
        yield from config.part_problems()
        return
    if ":" not in name:
        message = unknown_name(name, kind="algorithm", known=PRESETS, own="Class")
        if name in EXPERIMENTS:
            message = f"{name} trains on files, without generators; run `python -m core.quickstart {name}`"
        yield Problem(key="algorithm.name", message=message)
        return
    yield from _check_own(config, name)


def _check_own(config: PPOMATHConfig, name: str) -> Iterator[Problem]:
    try:
        algorithm = build_algorithm(config)
    except PluginError as error:
        yield Problem(key="algorithm.name", message=str(error))
        return
    except ConfigError as error:
        yield from error.problems
        return
    except ValueError as error:
        key, _, message = str(error).partition(": ")
        options = "algorithm.options"
        yield Problem(key=key, message=message) if key.startswith(options) else Problem(key=options, message=str(error))
        return
    if config.uses_critic and "values" not in algorithm.passes:
        message = f"false, but algorithm.name={name} has no use for a critic; write ppo.disable_value=true"
        yield Problem(key="ppo.disable_value", message=message)
    if algorithm.unit != "sequence" and not config.has_groups:
        yield needs_group(f"algorithm.name={name}")
