"""A walk over the keys of an algorithm: each changes the loss, is refused, or is reported as without effect."""

import random
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from core.checks.rules import unused_keys
from core.config.algorithm import AlgorithmSettings
from core.config.presets import PRESETS
from tools.loss.compute import Tokens, case_config, compute

OTHERS: Mapping[str, tuple[object, ...]] = {
    "kl_ctl": (0.3,),
    "kl_in": ("reward", "loss", "both"),
    "kl_estimator": ("k1", "k2", "k3", "low_var"),
    "kl_reward_level": ("token", "sequence"),
    "kl_loss_coeff": (0.7,),
    "kl_gradient": ("own", "k2", "ratio"),
    "discount": (0.9,),
    "gae_lambda": (0.8,),
    "advantage_std": ("none", "group", "batch"),
    "adv_norm": (True, False),
    "adv_norm_std": ("population", "sample"),
    "group_adv_norm": (True, False),
    "reward_output_scaling": (3.0,),
    "reward_output_bias": (0.7,),
    "mask_no_eos_with_zero": (True, False),
    "overlong_share": (0.6,),
    "overlong_penalty": (3.0,),
    "entropy_coeff": (0.1,),
    "eps_clip": (0.05, 0.6),
    "clip_low": (0.05,),
    "clip_high": (0.05, 3.0),
    "dual_clip": (1.1,),
    "ratio": ("token", "sequence"),
    "ratio_cap": (1.2,),
    "sapo_tau_positive": (3.0,),
    "sapo_tau_negative": (3.0,),
    "opmd_tau": (2.5,),
    "aggregation": ("token_mean", "sequence_mean", "sequence_sum", "constant"),
    "aggregation_constant": (7.0,),
    "behave_imp_weight_cap": (1.1, None),
    "correction_level": ("token", "sequence", "geometric"),
    "correction_min": (0.7,),
    "correction_max": (1.3,),
    "correction_veto": (0.6,),
    "proximal": ("recomputed", "loglinear", "reused"),
    "opsm_threshold": (0.0,),
    "m2po_threshold": (0.05,),
    "demonstration_loss": ("nll", "chord", "dpo"),
    "demonstration_beta": (0.9,),
}
"""Key -> values, of which at least one is not that of a run."""
NOT_IN_A_LOSS = {
    "advantage", "loss", "correction",  # each value is a case of its own
    "ppo_n_minibatches", "actor_sample_reuse",  # how a batch is dealt out: tests/core/test_trainer.py
    "disable_value", "critic_sample_reuse", "value_eps_clip", "value_norm",  # the critic: tests/core/test_trainer.py
    "dynamic_sampling", "dynamic_sampling_limit",  # which groups are taken: tests/rollout/experience/test_filters.py
    "kl_target", "kl_horizon",  # the coefficient of the next step: tests/core/algorithms/test_parts.py
    "demonstration_weight", "demonstration_warmup_steps", "demonstration_decay_steps", "demonstration_valley",  # mix
    "credit", "turn_weight", "turn_discount",  # of turns: tests/core/algorithms/test_turns.py
    "max_new_tokens",  # ppo.gen
}  # fmt: skip
OF_PPO = {
    "kl_ctl", "discount", "gae_lambda", "eps_clip", "reward_output_scaling", "reward_output_bias", "adv_norm",
    "mask_no_eos_with_zero",
}  # fmt: skip


def sequences(*, values: bool, demonstrations: bool) -> list[dict[str, Any]]:
    """Four answers to each of three prompts, far enough from each other and from the policies for every bound."""
    drawn, found = random.Random(1), []
    for group, answer in product(range(3), range(4)):
        count = 2 + (answer + group) % 4
        logprobs = [-drawn.uniform(0.2, 2) for _ in range(count)]

        def near(low: float, high: float, of: list[float] = logprobs) -> list[float]:
            return [min(-0.01, x + drawn.uniform(low, high)) for x in of]

        far = 12 if answer == 0 else 1
        row = {
            "logprobs": logprobs, "old_logprobs": near(-1.2, 1.2), "rollout_logprobs": near(-1.2, 1.7),
            "ref_logprobs": near(-far, 1), "entropy": [drawn.random() for _ in logprobs],
            "versions": [drawn.choice([1, 2, 3]) for _ in logprobs], "group": group, "truncated": answer == 3,
            "reward": (-3.0, 1.0, 0.5, -1.0)[(answer + group) % 4],
        }  # fmt: skip
        found.append(row | ({"values": [drawn.uniform(-1, 1) for _ in logprobs]} if values else {}))
    for row, reward in zip(found[-2:], (1.0, 0.0), strict=True) if demonstrations else ():
        row |= {"demonstration": True, "group": "pair", "reward": reward}
    return found


def wrong_keys(name: str | None, given: Mapping[str, object]) -> dict[str, str]:
    """The keys whose effect is another than what is reported."""
    settings = {"ppo.kl_ctl": 0.1, "ppo.gen.max_new_tokens": 6, **given}
    demonstrations = name is not None and "algorithm.demonstration_weight" in PRESETS[name].values
    case: dict[str, Any] = {"algorithm": name, "version": 3}
    case["sequences"] = sequences(values=name in (None, "ppo"), demonstrations=demonstrations)

    def result(**changed: object) -> tuple[object, object]:
        out = compute({**case, "settings": {**settings, **changed}})
        return out["loss"], out["grads"]

    config = case_config({**case, "settings": settings}, Tokens.read(case).sampled)
    paths = {f"{prefix}{key}": key for key in OTHERS for prefix in ("ppo.", "algorithm.", "")}
    without_effect = {paths[path] for path, _ in unused_keys(config, paths.keys())}
    now, reads, before = config.algorithm_settings, OTHERS.keys() - without_effect, result()
    wrong = {}
    for key, values in OTHERS.items():
        path = f"ppo.{key}" if key in OF_PPO else key
        tried = []
        for value in values:
            if getattr(now, key) != value:
                try:
                    tried.append(result(**{path: value}) != before)
                except ValueError:
                    continue  # refused
        if tried and any(tried) != (key in reads):
            wrong[key] = "reported, and has an effect" if any(tried) else "without effect, and not reported"
    return wrong


def test_every_setting_of_an_algorithm_is_walked_or_tested_elsewhere() -> None:
    assert OTHERS.keys() | NOT_IN_A_LOSS == AlgorithmSettings.model_fields.keys()
    assert not OTHERS.keys() & NOT_IN_A_LOSS


@pytest.mark.parametrize(
    ("name", "given"),
    [
        (None, {"kl_in": "both"}),
        ("grpo", {"overlong_share": 0.5, "kl_in": "loss"}),
        ("rloo", {"loss": "cispo", "correction": "tis", "aggregation": "constant"}),
        ("rloo", {"loss": "sapo", "correction": "icepop", "advantage": "group"}),
        ("rloo", {"loss": "topr", "correction": "bypass", "advantage": "logavgexp"}),
        ("opmd", {}),
        ("opmd", {"m2po_threshold": 0.2, "kl_in": "reward"}),
        ("ppo", {"loss": "kimi", "correction": "mis", "advantage": "returns"}),
        ("rloo", {"loss": "tv", "correction": "decoupled", "advantage": "maxrl"}),
        ("mix", {"group_adv_norm": False}),
    ],
)
def test_a_key_changes_the_loss_or_is_refused_or_reported(name: str | None, given: dict[str, object]) -> None:
    assert wrong_keys(name, given) == {}


LOSSES = ("clip", "cispo", "sapo", "topr", "opmd", "kimi", "tv")
CORRECTIONS = ("none", "bypass", "decoupled", "tis", "mis", "icepop")
ADVANTAGES = ("gae", "returns", "group", "leave_one_out", "logavgexp", "maxrl")


@pytest.mark.nightly
def test_a_key_of_any_algorithm_changes_the_loss_or_is_refused_or_reported() -> None:
    cases: list[tuple[str | None, dict[str, object]]] = [(name, {}) for name in PRESETS]
    cases += [("rloo", {"loss": loss, "correction": way}) for loss, way in product(LOSSES, CORRECTIONS)]
    common = {"overlong_share": 0.5, "aggregation": "constant"}
    kinds = product(ADVANTAGES, ("reward", "loss", "both"))
    cases += [("ppo", {"advantage": advantage, "kl_in": kl_in, **common}) for advantage, kl_in in kinds]
    wrong = {f"{name} {given}": found for name, given in cases if (found := wrong_keys(name, given))}
    assert not wrong
