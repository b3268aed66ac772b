"""GRPO: PPO without a critic, whose advantages are rewards normalised over the answers to one prompt.

Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2. algorithm.name=grpo computes what ppo.disable_value=true with
group_adv_norm=true computes, but minibatches never split a group; the older spelling deals single sequences (see ppo).
The standard deviation is that of the population (divided by n).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.algorithms.ppo import PPO
from core.algorithms.settings import COMMON, AlgorithmSettings


class GRPO(PPO):
    """Group-normalised rewards as advantages."""

    unit = "group"
    reads = COMMON | {"eps_clip", "discount", "gae_lambda", "adv_norm"}

    def __init__(self, settings: AlgorithmSettings, options: Mapping[str, Any]) -> None:
        super().__init__(replace(settings, disable_value=True, value_norm=False, group_adv_norm=True), options)
