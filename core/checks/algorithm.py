"""What is wrong with the choice of an algorithm and of its parts."""

from __future__ import annotations

from collections.abc import Iterator

from core.algorithms.build import build_algorithm
from core.config.algorithm import needs_group
from core.config.experiments import EXPERIMENTS, PPOMATHConfig
from core.config.parsing.problems import ConfigError, Problem
from core.config.presets import PRESETS
from rollout.plugins import PluginError, unknown_name


def check_algorithm(config: PPOMATHConfig) -> Iterator[Problem]:
    """Yield what is wrong with algorithm.*; only an algorithm of the user is imported, and torch with it."""
    name = config.own_algorithm
    if name is None:
        yield from config.part_problems()
        yield from _check_demonstrations(config)
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


def _check_demonstrations(config: PPOMATHConfig) -> Iterator[Problem]:
    if not config.algorithm.mixes_demonstrations:
        return
    given, minibatches = config.demonstrations_per_step, config.num_minibatches
    if not config.demonstrations.are_given:
        by_name = "algorithm.demonstration_weight" in config.preset
        name = f"algorithm.name={config.algorithm_name}" if by_name else "it"
        message = f"required: {name} trains on prompts with answers beside rollouts; or write "
        yield Problem(key="demonstrations.path", message=message + "algorithm.demonstration_weight=0")
    elif given < minibatches:
        message = f"{config.demonstrations.share}: {given} demonstrations of a step are fewer than "
        message += f"ppo_n_minibatches={minibatches}; raise one or lower the other"
        yield Problem(key="demonstrations.share", message=message)
