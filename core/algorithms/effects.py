"""Which settings have an effect, given the others: the rest is reported at the start. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

from core.algorithms.presets import PRESETS, preset_settings
from core.algorithms.settings import AlgorithmSettings

_ALWAYS = frozenset({
    "ppo_n_minibatches", "actor_sample_reuse", "kl_ctl",
    "reward_output_scaling", "reward_output_bias", "mask_no_eos_with_zero", "adv_norm",
    "entropy_coeff", "advantage", "loss", "aggregation", "correction", "overlong_share",
    "opsm_threshold", "dynamic_sampling", "demonstration_weight",
})  # fmt: skip
_ADVANTAGE: Mapping[str, frozenset[str]] = {
    "gae": frozenset({"discount", "gae_lambda", "group_adv_norm"}),
    "returns": frozenset({"discount"}),
    "group": frozenset({"discount", "gae_lambda", "advantage_std"}),
    "leave_one_out": frozenset(),
    "logavgexp": frozenset({"opmd_tau"}),
    "maxrl": frozenset(),
}
_CLIP = frozenset({"clip_low", "clip_high"})
_LOSS: Mapping[str, frozenset[str]] = {
    "clip": _CLIP | {"ratio", "dual_clip"},
    "cispo": _CLIP | {"ratio"},
    "sapo": frozenset({"ratio", "sapo_tau_positive", "sapo_tau_negative"}),
    "topr": frozenset({"ratio"}),
    "opmd": frozenset({"opmd_tau"}),
    "kimi": frozenset({"opmd_tau"}),
    "tv": _CLIP | {"ratio", "ratio_cap"},
}
_BOUNDED = frozenset({"correction_min", "correction_max", "correction_veto"})
_CORRECTION: Mapping[str, frozenset[str]] = {
    "none": frozenset({"proximal", "m2po_threshold"}),
    "bypass": frozenset(),
    "decoupled": frozenset({"proximal", "m2po_threshold", "behave_imp_weight_cap"}),
    "tis": _BOUNDED | {"proximal", "m2po_threshold", "correction_level"},
    "mis": _BOUNDED | {"proximal", "m2po_threshold", "correction_level"},
    "icepop": _BOUNDED | {"proximal", "m2po_threshold"},
}


def keys_read(settings: AlgorithmSettings) -> frozenset[str]:
    """Return the names of the settings that change what a run with these settings computes."""
    reads = _ALWAYS | _ADVANTAGE[settings.advantage] | _LOSS[settings.loss] | _CORRECTION[settings.correction]
    if settings.loss == "opmd" and settings.correction == "none":
        reads -= {"proximal"}  # it has neither a ratio nor a weight
    if "clip_low" in reads and None in (settings.clip_low, settings.clip_high):
        reads |= {"eps_clip"}
    if not settings.disable_value:
        reads |= {"value_eps_clip", "value_norm", "critic_sample_reuse"}
    if settings.adv_norm:
        reads |= {"adv_norm_std"}
    if settings.dynamic_sampling:
        reads |= {"dynamic_sampling_limit"}
    if settings.overlong_share:
        reads |= {"overlong_penalty"}
    if settings.aggregation == "constant":
        reads |= {"aggregation_constant"}
    if settings.demonstration_weight:
        reads |= {"demonstration_loss", "demonstration_warmup_steps", "demonstration_decay_steps"}
    if settings.demonstration_weight and settings.demonstration_decay_steps:
        reads |= {"demonstration_valley"}
    return reads | _kl_keys(settings)


def _kl_keys(settings: AlgorithmSettings) -> frozenset[str]:
    if not settings.needs_reference:
        return frozenset()
    reads = {"kl_in", "kl_estimator"}
    if settings.kl_in_reward:
        reads |= {"kl_reward_level", "kl_target"}
    if settings.kl_target is not None:
        reads |= {"kl_horizon"}
    if settings.kl_in != "reward":
        reads |= {"kl_gradient"}
    if settings.kl_in == "both":
        reads |= {"kl_loss_coeff"}
    return frozenset(reads)


_DECIDED_BY: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("discount", "gae_lambda", "group_adv_norm", "advantage_std", "disable_value"), ("advantage",)),
    **dict.fromkeys(
        ("clip_low", "clip_high", "ratio", "dual_clip", "ratio_cap", "sapo_tau_positive", "sapo_tau_negative"),
        ("loss",),
    ),
    "opmd_tau": ("advantage", "loss"),
    **dict.fromkeys(
        (
            "decoupled", "behave_imp_weight_cap", "correction_min", "correction_max", "correction_veto",
            "correction_level", "m2po_threshold",
        ),
        ("correction",),
    ),
    **dict.fromkeys(("kl_estimator", "kl_reward_level", "kl_target", "kl_gradient", "kl_loss_coeff"), ("kl_in",)),
    "kl_horizon": ("kl_target",),
    "adv_norm_std": ("adv_norm",),
    "dynamic_sampling_limit": ("dynamic_sampling",),
    "overlong_penalty": ("overlong_share",),
    "aggregation_constant": ("aggregation",),
    **dict.fromkeys(
        ("demonstration_loss", "demonstration_warmup_steps", "demonstration_decay_steps"), ("demonstration_weight",)
    ),
}  # fmt: skip
"""Setting -> those that leave it without effect, wherever nothing else in decided_by() does."""


def decided_by(key: str, settings: AlgorithmSettings) -> tuple[str, ...]:
    """Return the names of the settings because of which a setting that keys_read() leaves out has no effect."""
    if key in ("value_eps_clip", "value_norm", "critic_sample_reuse"):
        return ("disable_value",) if settings.advantage == "gae" else ("advantage",)
    if key.startswith("kl_") and not settings.needs_reference:
        return ("kl_ctl",)
    if key == "eps_clip":
        return ("clip_low", "clip_high") if "clip_low" in _LOSS[settings.loss] else ("loss",)
    if key == "proximal":
        return ("correction",) if settings.correction == "bypass" else ("loss", "correction")
    if key == "demonstration_valley":
        return ("demonstration_decay_steps",) if settings.demonstration_weight else ("demonstration_weight",)
    return _DECIDED_BY[key]


def readers(key: str) -> list[str]:
    """Return the presets that read a key, with the settings that they set themselves."""
    return [name for name in PRESETS if key in keys_read(preset_settings(name))]
