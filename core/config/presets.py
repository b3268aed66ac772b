"""Algorithms by name: the configuration keys that each name sets where the user did not. Standard library only.

A name is nothing but these values; every part can be changed by its own key. Keys that a preset leaves out keep their
defaults, which are those of PPO.
"""

from collections.abc import Mapping
from typing import NamedTuple

from config_schema.needs import Value


class Preset(NamedTuple):
    """What a name stands for."""

    about: str
    source: str
    values: Mapping[str, Value] = {}
    """Dotted key -> value."""


_GROUP: Mapping[str, Value] = {"algorithm.advantage": "group", "ppo.adv_norm": False}
_OUTCOME: Mapping[str, Value] = {**_GROUP, "ppo.kl_ctl": 0.0, "algorithm.kl_reward_level": "sequence"}
"""Advantages from rewards of groups, without a reference model."""

PRESETS: Mapping[str, Preset] = {
    "ppo": Preset("PPO with a critic and GAE", "Schulman et al. 2017"),
    "grpo": Preset("rewards standardised in each group", "Shao et al. 2024 (DeepSeekMath)", _GROUP),
    "dr_grpo": Preset(
        "rewards centred in each group; tokens summed and divided by a constant",
        "Liu et al. 2025 (Understanding R1-Zero-like training)",
        {**_OUTCOME, "algorithm.advantage_std": "none", "algorithm.aggregation": "constant"},
    ),
    "dapo": Preset(
        "GRPO with a higher upper clip bound, dynamic sampling and a soft penalty of overlong answers",
        "Yu et al. 2025 (DAPO)",
        {
            **_OUTCOME, "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28, "algorithm.overlong_share": 0.2,
            "algorithm.dynamic_sampling": True,
        },
    ),
    "gspo": Preset(
        "ratios of whole sequences, mean over sequences",
        "Zheng et al. 2025 (Group sequence policy optimization)",
        {
            **_GROUP, "algorithm.kl_reward_level": "sequence", "algorithm.ratio": "sequence",
            "algorithm.clip_low": 3e-4, "algorithm.clip_high": 4e-4, "algorithm.aggregation": "sequence_mean",
        },
    ),
    "cispo": Preset(
        "clipped ratios as constant weights of the policy gradient",
        "MiniMax 2025 (MiniMax-M1)",
        {**_OUTCOME, "algorithm.loss": "cispo", "algorithm.clip_low": 1.0, "algorithm.clip_high": 4.0},
    ),
    "sapo": Preset(
        "a smooth gate in place of clipping",
        "Gao et al. 2025 (Soft adaptive policy optimization)",
        {**_OUTCOME, "algorithm.loss": "sapo", "algorithm.aggregation": "sequence_mean"},
    ),
    "topr": Preset(
        "ratios up to 1 as weights of negative examples only",
        "Le Roux et al. 2025 (Tapered off-policy REINFORCE)",
        {**_OUTCOME, "algorithm.advantage_std": "none", "algorithm.loss": "topr", "algorithm.correction": "bypass"},
    ),
    "rloo": Preset(
        "reward minus the mean reward of the other answers",
        "Ahmadian et al. 2024 (Back to basics)",
        {
            "algorithm.advantage": "leave_one_out", "algorithm.kl_reward_level": "sequence", "ppo.adv_norm": False,
        },
    ),
    "reinforce_pp": Preset(
        "discounted returns, whitened over the batch",
        "Hu 2025 (REINFORCE++)",
        {
            "algorithm.advantage": "returns", "ppo.adv_norm": True, "algorithm.adv_norm_std": "sample",
            "ppo.kl_ctl": 0.0,
        },
    ),
    "reinforce_pp_baseline": Preset(
        "rewards centred in each group, whitened over the batch",
        "Hu 2025 (REINFORCE++)",
        {
            **_OUTCOME, "algorithm.advantage_std": "none", "ppo.adv_norm": True, "algorithm.adv_norm_std": "sample",
        },
    ),
    "opmd": Preset(
        "policy gradient without ratios on rewards centred in each group",
        "Trinity-RFT 0.6 (OPMD)",
        {**_OUTCOME, "algorithm.advantage_std": "none", "algorithm.loss": "opmd", "algorithm.correction": "none"},
    ),
    "opmd_logavgexp": Preset(
        "as opmd, with the baseline tau * log mean exp(reward / tau)",
        "Trinity-RFT 0.6 (OPMD)",
        {**_OUTCOME, "algorithm.advantage": "logavgexp", "algorithm.loss": "opmd", "algorithm.correction": "none"},
    ),
    "opmd_kimi": Preset(
        "as opmd, with a squared log-ratio of each sequence",
        "Kimi team 2025 (Kimi k1.5), as in Trinity-RFT",
        {**_OUTCOME, "algorithm.advantage_std": "none", "algorithm.loss": "kimi", "algorithm.correction": "none"},
    ),
    "maxrl": Preset(
        "rewards centred in each group and divided by the group's mean",
        "Tajwar et al. 2026 (Maximum likelihood reinforcement learning), as in prime-rl",
        {**_OUTCOME, "algorithm.advantage": "maxrl"},
    ),
    "mix": Preset(
        "GRPO on rollouts and fine-tuning on demonstrations in every step",
        "Trinity-RFT 0.6 (MIX)",
        {**_OUTCOME, "algorithm.demonstration_weight": 0.1},
    ),
    "chord": Preset(
        "as mix, with demonstrated tokens weighed by p (1 - p)",
        "Zhang et al. 2025 (CHORD), as in Trinity-RFT 0.6",
        {**_OUTCOME, "algorithm.demonstration_weight": 0.1, "algorithm.demonstration_loss": "chord"},
    ),
}  # fmt: skip


def plain_name(name: str) -> str:
    """Return the name of a preset as PRESETS has it; it may be given in any case and with any of - . + in it."""
    return name.lower().replace("++", "_pp").replace("-", "_").replace(".", "_")


def with_preset(tree: Mapping[str, object]) -> dict[str, object]:
    """Add the values of tree["algorithm"]["name"] to a tree of sections, where the tree has no own ones."""
    section = tree.get("algorithm")
    name = section.get("name") if isinstance(section, Mapping) else None
    out = dict(tree)
    preset = PRESETS.get(name) if isinstance(name, str) else None
    for dotted, value in (preset.values if preset else {}).items():
        above, _, key = dotted.partition(".")
        given = out.get(above, {})
        if isinstance(given, Mapping):
            out[above] = {key: value, **given}
    return out
