"""From a configuration to the algorithm of a run, and the options of one of the user. Loads torch with the algorithm
alone: the checks of a configuration import this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from config_schema.section import Section
from core.config.algorithm import AlgorithmSettings
from core.config.experiments import PPOMATHConfig
from core.config.load import bind
from core.config.presets import PRESETS
from rollout.plugins import load_plugin

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
