"""Rules across several keys.

Every rule names the keys that it reads, so that a key that is wrong by itself is not reported twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from core.checks.algorithm import algorithm_warnings
from core.checks.facts import not_used, recomputation_warnings, unused_keys
from core.config.base import Violation
from core.config.experiments import DPOConfig, ExperimentConfig, PPOMATHConfig, SFTConfig
from core.config.models import ModelTrainEvalConfig
from core.config.runtime import NOT_IN_A_RUN
from core.placement.rules import check_allocation

_MORE_THAN_ALL_TOKENS = 1_000_000
"""No vocabulary is so large: as a top_k it cuts nothing off."""


def check_rules(config: ExperimentConfig) -> Iterator[Violation]:
    """Yield every rule that `config` breaks."""
    if config.mode == "local" and config.n_nodes > 1:
        yield Violation(("mode", "n_nodes"), f"mode=local is for one node, n_nodes={config.n_nodes}; write mode=ray")
    if config.mode == "local" and config.launch.ray_address:
        message = f"mode=local is for this machine, launch.ray_address={config.launch.ray_address}; write mode=ray"
        yield Violation(("mode", "launch.ray_address"), message)
    yield from _tracing(config)
    yield from _microbatches(config)
    yield from _evaluation(config)
    yield from _template(config)
    for rule in _RULES[config.NAME]:
        yield from rule(config)
    yield from check_allocation(config)


def config_warnings(config: ExperimentConfig) -> Iterator[str]:
    """Yield settings that are valid but probably not intended."""
    unused: dict[str, list[str]] = {}
    for key, reason in unused_keys(config):
        unused.setdefault(reason, []).append(key)
    for reason, keys in unused.items():
        yield not_used(keys, reason)
    for warn in _WARNINGS[config.NAME]:
        yield from warn(config)


def _inexact_sampling(config: PPOMATHConfig) -> Iterator[str]:
    gen = config.ppo.gen
    if gen.top_p < 1.0 or 0 < gen.top_k < _MORE_THAN_ALL_TOKENS:
        yield (
            f"ppo.gen.top_p={gen.top_p}, top_k={gen.top_k}: completions come from a truncated distribution; the "
            "trainer's log-probabilities refer to the full one, which biases importance weights; "
            "top_p=1, top_k=-1 are exact"
        )
    if gen.min_new_tokens:
        yield (
            f"ppo.gen.min_new_tokens={gen.min_new_tokens}: until then stop tokens are excluded from sampling, "
            "but included in the trainer's log-probabilities; min_new_tokens=0 is exact"
        )


def _quantized_sampling(config: PPOMATHConfig) -> Iterator[str]:
    wanted = config.generator.weight_format
    if wanted != "auto" and config.correction in ("none", "bypass"):
        yield (
            f"generator.weight_format={wanted}: completions come from weights that are rounded to FP8, and "
            f"algorithm.correction={config.correction} has no importance weight between them and the trainer's; "
            "write algorithm.correction=tis"
        )
    if wanted != "auto" and config.push.verify == "never":
        yield (
            f"push.verify=never: with generator.weight_format={wanted}, the formats of the servers' weights are not "
            "checked; write push.verify=first"
        )


def _tracing(config: ExperimentConfig) -> Iterator[Violation]:
    for name, why in NOT_IN_A_RUN.items():
        if name in config.external_configs.envs:
            yield Violation(("external_configs.envs",), f"{name} cannot be set: {why}; leave it out")


def _microbatches(config: ExperimentConfig) -> Iterator[Violation]:
    parts = config.LENGTH_KEYS
    for role, section in config.roles.items():
        limit = section.mb_spec.max_tokens_per_mb
        if limit is not None and limit < config.max_seqlen:
            yield Violation(
                (f"{role}.mb_spec.max_tokens_per_mb", *parts),
                f"max_tokens_per_mb={limit} cannot hold the longest sequence, {' + '.join(parts)} = "
                f"{config.max_seqlen}; raise it to at least {config.max_seqlen}",
            )


def _evaluation(config: ExperimentConfig) -> Iterator[Violation]:
    control = config.exp_ctrl
    if not config.evaluates and (control.eval_freq_epochs or control.eval_freq_steps or control.eval_freq_secs):
        yield Violation(
            (config.EVALUATION_KEY, "exp_ctrl"), "exp_ctrl.eval_freq_* enables evaluation; set this to a jsonl file"
        )


def _sampling(config: PPOMATHConfig) -> Iterator[Violation]:
    gen = config.ppo.gen
    if gen.min_new_tokens > gen.max_new_tokens:
        yield Violation(
            ("ppo.gen.min_new_tokens", "ppo.gen.max_new_tokens"),
            f"min_new_tokens={gen.min_new_tokens} must be at most max_new_tokens={gen.max_new_tokens}",
        )
    if gen.top_k == 0:
        yield Violation(("ppo.gen.top_k",), "top_k=0 leaves no token to sample; write -1 for all")
    if config.group_adv_norm and config.group_size == 1:
        yield Violation(
            ("group_adv_norm", "group_size"),
            "group_adv_norm=true normalizes within a group and requires group_size of at least 2, got 1",
        )


def _template(config: ExperimentConfig) -> Iterator[Violation]:
    template = config.prompt.template
    if template is not None and "{prompt}" not in template:
        message = f"template={template!r} has no {{prompt}}; write it where the prompt belongs"
        yield Violation(("prompt.template",), message)


def _sft_model(config: SFTConfig) -> Iterator[Violation]:
    return _trained_model("model", config.model)


def _reference(config: PPOMATHConfig | DPOConfig) -> Iterator[Violation]:
    if config.ref.type.is_critic:
        yield Violation(("ref.type.is_critic",), "ref is a language model; only the critic has a value head")


def _ppo_models(config: PPOMATHConfig) -> Iterator[Violation]:
    yield from _trained_model("actor", config.actor)
    yield from _reference(config)
    if not config.uses_critic:
        return
    if not config.critic.path and not config.critic.init_critic_from_actor:
        yield Violation(
            ("critic.path", "critic.init_critic_from_actor", "ppo.disable_value"),
            "required with a critic: the folder of a value model; or initialize it from the actor with "
            "critic.init_critic_from_actor=true; or train without one with ppo.disable_value=true",
        )
    if config.critic.optimizer.type == "empty":
        yield Violation(("critic.optimizer.type",), "the critic is trained; write adam, or ppo.disable_value=true")


def _trained_model(name: str, model: ModelTrainEvalConfig) -> Iterator[Violation]:
    if not model.path:
        yield Violation((f"{name}.path",), "required: the Hugging Face folder of the model to train")
    if model.type.is_critic:
        yield Violation((f"{name}.type.is_critic",), f"{name} is a language model; only the critic has a value head")
    if model.optimizer.type == "empty":
        yield Violation((f"{name}.optimizer.type",), f"{name} is trained; write adam")


_RULES: Mapping[str, tuple[Callable[[Any], Iterator[Violation]], ...]] = {
    "ppo-math": (_sampling, _ppo_models),
    "sft": (_sft_model,),
    "dpo": (_sft_model, _reference),
}
_WARNINGS: Mapping[str, tuple[Callable[[Any], Iterator[str]], ...]] = {
    "ppo-math": (_inexact_sampling, _quantized_sampling, algorithm_warnings, recomputation_warnings),
    "sft": (recomputation_warnings,),
    "dpo": (recomputation_warnings,),
}
"""Rules and warnings that only one experiment has, by its name."""
