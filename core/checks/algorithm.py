"""What is wrong with the choice of an algorithm and of its parts."""

from __future__ import annotations

from collections.abc import Iterator

from core.algorithms.build import algorithm_settings, build_algorithm
from core.config.algorithm import BOUNDS, AlgorithmSettings
from core.config.experiments import EXPERIMENTS, PPOMATHConfig
from core.config.parsing.problems import ConfigError, Problem
from core.config.presets import PRESETS
from rollout.plugins import PluginError, unknown_name


def check_algorithm(config: PPOMATHConfig) -> Iterator[Problem]:
    """Yield what is wrong with algorithm.*; only an algorithm of the user is imported, and torch with it."""
    name, options = config.algorithm.name, config.algorithm.options
    if name in PRESETS or name is None:
        if options:
            message = (
                f"{', '.join(options)}: options belong to an algorithm of your own; write algorithm.{[*options][0]}"
            )
            yield Problem(key="algorithm.options", message=message)
        yield from _check_parts(config, algorithm_settings(config))
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
    if algorithm.unit != "sequence" and config.group_size == 1:
        yield _needs_group(f"algorithm.name={name}")


def _needs_group(what: str) -> Problem:
    return Problem(key="group_size", message=f"{what} compares the answers to one prompt and needs at least 2, got 1")


def _check_parts(config: PPOMATHConfig, settings: AlgorithmSettings) -> Iterator[Problem]:
    """Yield combinations of parts that compute nothing sensible."""
    section = config.algorithm
    if settings.compares_groups and config.group_size == 1 and not settings.group_adv_norm:  # which a rule refuses
        preset = PRESETS.get(section.name or "")
        by_name = preset is not None and preset.values.get("algorithm.advantage") == section.advantage
        yield _needs_group(f"algorithm.name={section.name}" if by_name else f"algorithm.advantage={section.advantage}")
    elif settings.dynamic_sampling and config.group_size == 1:
        message = "true, but the only answer to a prompt has no other reward to differ from; write group_size of at "
        yield Problem(key="algorithm.dynamic_sampling", message=message + "least 2, or false")
    yield from _check_credit(config, settings)
    yield from _check_demonstrations(config, settings)
    yield from _check_correction(config, settings)
    yield from _check_proximal(config, settings)
    low, high = settings.clip_range
    if settings.loss == "clip" and not (low < 1.0 and high > 0.0):
        message = (
            f"{low}, but loss=clip keeps ratios in 1 - clip_low to 1 + clip_high; write less than 1, or loss=cispo"
        )
        yield Problem(key="algorithm.clip_low", message=message)
    if 0.0 < settings.dual_clip <= 1.0:
        message = f"must be greater than 1, got {settings.dual_clip}: it bounds the loss above the clip range; write 3"
        yield Problem(key="algorithm.dual_clip", message=message)
    if settings.kl_target is not None and not settings.kl_in_reward:
        message = (
            "needs the KL divergence in the reward, where it is measured; write kl_in=reward or both, and ppo.kl_ctl"
        )
        yield Problem(key="algorithm.kl_target", message=message)


def _check_credit(config: PPOMATHConfig, settings: AlgorithmSettings) -> Iterator[Problem]:
    """Yield what algorithm.credit needs."""
    if settings.credit == "turn_gae" and (settings.disable_value or settings.compares_groups):
        message = "turn_gae: needs the values of a critic; write ppo.disable_value=false, advantage=gae and "
        yield Problem(key="algorithm.credit", message=message + "group_adv_norm=false, or credit=turn_rewards")
    if settings.credit in ("turn_rewards", "step_groups") and settings.advantage != "group":
        message = f"{settings.credit}: compares turns within a group; write advantage=group (algorithm.name=grpo), got "
        yield Problem(key="algorithm.credit", message=message + f"advantage={settings.advantage}")


def _check_demonstrations(config: PPOMATHConfig, settings: AlgorithmSettings) -> Iterator[Problem]:
    if not settings.mixes_demonstrations:
        return
    if not config.demonstrations.path:
        preset = PRESETS.get(config.algorithm.name or "")
        by_name = preset is not None and "algorithm.demonstration_weight" in preset.values
        name = f"algorithm.name={config.algorithm.name}" if by_name else "it"
        message = f"required: {name} trains on prompts with answers beside rollouts; or write "
        yield Problem(key="demonstrations.path", message=message + "algorithm.demonstration_weight=0")
    elif config.demonstrations_per_step < config.ppo.ppo_n_minibatches:
        message = f"{config.demonstrations.share}: {config.demonstrations_per_step} demonstrations of a step are fewer "
        message += f"than ppo_n_minibatches={config.ppo.ppo_n_minibatches}; raise one or lower the other"
        yield Problem(key="demonstrations.share", message=message)
    if settings.aggregation not in ("token_mean", "sequence_mean"):
        message = f"{settings.aggregation} has no scale to mix demonstrations with; write token_mean or sequence_mean"
        yield Problem(key="algorithm.aggregation", message=message)


def _check_correction(config: PPOMATHConfig, settings: AlgorithmSettings) -> Iterator[Problem]:
    section, correction = config.algorithm, settings.correction
    if correction in ("tis", "mis", "icepop"):
        if (correction, settings.level) not in BOUNDS:
            levels = " or ".join(level for name, level in BOUNDS if name == correction)
            message = f"{settings.level} does not exist for correction={correction}; write {levels}"
            yield Problem(key="algorithm.correction_level", message=message)
        elif settings.bounds[0] >= settings.bounds[1]:
            low, high = settings.bounds
            message = f"{low} must be less than correction_max={high}"
            yield Problem(key="algorithm.correction_min", message=message)
    if correction == "bypass" and section.m2po_threshold is not None:
        message = (
            "has nothing to correct: with correction=bypass the proximal policy is the behaviour policy; write none"
        )
        yield Problem(key="algorithm.m2po_threshold", message=f"{message}, or decoupled")


def _check_proximal(config: PPOMATHConfig, settings: AlgorithmSettings) -> Iterator[Problem]:
    proximal, updates = settings.proximal, settings.num_updates
    if proximal == "recomputed":
        return
    key = "algorithm.proximal"
    if settings.correction == "bypass":
        message = f"{proximal}, but with correction=bypass the behaviour policy takes its place; write recomputed"
        yield Problem(key=key, message=message)
    elif proximal == "reused" and updates > 1:
        message = f"reused needs one update per step, got {updates} (ppo_n_minibatches * actor_sample_reuse)"
        message += "; write recomputed"
        yield Problem(key=key, message=message)
    elif proximal == "loglinear" and config.is_synchronous:
        message = "loglinear has nothing to interpolate with staleness.max_staleness=0; write recomputed"
        yield Problem(key=key, message=message)
