"""From configuration to algorithm: which one, with which settings, and which keys it has no use for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from core.algorithms import ALGORITHMS
from core.algorithms.settings import AlgorithmSettings
from core.config.base import Problem
from core.config.experiments import PPOMATHConfig
from rollout.plugins import PluginError, load_plugin

if TYPE_CHECKING:
    from core.algorithms.base import Algorithm

ALGORITHM_KEYS = {
    "ppo": ("ppo_n_minibatches", "eps_clip", "value_eps_clip", "kl_ctl", "discount", "gae_lambda", "adv_norm",
            "value_norm", "disable_value", "reward_output_scaling", "reward_output_bias", "mask_no_eos_with_zero"),
    "algorithm": ("decoupled", "behave_imp_weight_cap", "kl_in", "kl_estimator", "entropy_coeff"),
    "": ("group_adv_norm",),
}  # fmt: skip
"""The keys of AlgorithmSettings, by section."""


def algorithm_settings(config: PPOMATHConfig) -> AlgorithmSettings:
    """Return the algorithm's part of the configuration, derived values filled in."""
    ppo, algorithm = config.ppo, config.algorithm
    return AlgorithmSettings(
        ppo_n_minibatches=ppo.ppo_n_minibatches,
        kl_ctl=ppo.kl_ctl,
        kl_in=algorithm.kl_in,
        kl_estimator=config.kl_estimator,
        discount=ppo.discount,
        gae_lambda=ppo.gae_lambda,
        eps_clip=ppo.eps_clip,
        value_eps_clip=ppo.value_eps_clip,
        disable_value=not config.uses_critic,
        reward_output_scaling=ppo.reward_output_scaling,
        reward_output_bias=ppo.reward_output_bias,
        adv_norm=ppo.adv_norm,
        value_norm=ppo.value_norm and config.uses_critic,
        group_adv_norm=config.group_adv_norm,
        mask_no_eos_with_zero=ppo.mask_no_eos_with_zero,
        decoupled=config.decoupled,
        behave_imp_weight_cap=algorithm.behave_imp_weight_cap,
        entropy_coeff=algorithm.entropy_coeff,
    )


def load_algorithm(name: str) -> Any:
    """Return the class of an algorithm: a key of ALGORITHMS or package.module:Class. Imports torch. Raises
    PluginError."""
    path = ALGORITHMS[name].path if name in ALGORITHMS else name
    return load_plugin(path, kind="algorithm", arguments=("settings", "options"))


def build_algorithm(config: PPOMATHConfig) -> Algorithm:
    """Return the algorithm of this run. Imports torch. Raises ValueError for a name or options that do not exist."""
    return load_algorithm(config.algorithm_name)(algorithm_settings(config), config.algorithm.options)


def check_algorithm(config: PPOMATHConfig) -> Iterator[Problem]:
    """Yield what is wrong with algorithm.*; a configuration that names an algorithm imports it, and torch with it."""
    name = config.algorithm.name
    if name is None:
        if config.algorithm.options:
            message = f"{', '.join(config.algorithm.options)}: options belong to an algorithm; set algorithm.name"
            yield Problem(key="algorithm.options", message=message)
        return
    if name not in ALGORITHMS and ":" not in name:
        message = f"unknown algorithm {name!r}; use one of {', '.join(ALGORITHMS)}, or package.module:Class"
        yield Problem(key="algorithm.name", message=message)
        return
    try:
        algorithm = build_algorithm(config)
    except PluginError as error:
        yield Problem(key="algorithm.name", message=str(error))
        return
    except ValueError as error:
        key, _, message = str(error).partition(": ")
        options = "algorithm.options"
        yield Problem(key=key, message=message) if key.startswith(options) else Problem(key=options, message=str(error))
        return
    if config.uses_critic and "values" not in algorithm.passes:
        message = f"false, but algorithm.name={name} has no use for a critic; write ppo.disable_value=true"
        yield Problem(key="ppo.disable_value", message=message)
    if algorithm.unit != "sequence" and config.group_size == 1:
        message = f"algorithm.name={name} compares the answers to one prompt and needs at least 2, got 1"
        yield Problem(key="group_size", message=message)


def unread_settings(config: PPOMATHConfig) -> Iterator[str]:
    """Yield the keys that were given and that the named algorithm does not read."""
    if config.algorithm.name is None:
        return
    reads = load_algorithm(config.algorithm.name).reads
    if reads is None:
        return
    for section, names in ALGORITHM_KEYS.items():
        given = getattr(config, section).model_fields_set if section else config.model_fields_set
        yield from (f"{section}.{name}".lstrip(".") for name in names if name in given and name not in reads)
