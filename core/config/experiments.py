"""The experiments as configuration trees: `ppo-math`, `sft` and `dpo`. Sections are defined in the other modules of
core/config.

Code reads a key as an attribute: `config.ppo.eps_clip`. What a null stands for is a property or a method, so that the
rule is written once. Every experiment has the properties of `SFTConfig`, so that callers never look at the class.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.config.file_experiments import DPOConfig, SFTConfig
from core.config.ppo_experiment import PPOMATHConfig

ExperimentConfig = PPOMATHConfig | SFTConfig | DPOConfig

EXPERIMENTS: Mapping[str, type[PPOMATHConfig] | type[SFTConfig] | type[DPOConfig]] = {
    "ppo-math": PPOMATHConfig, "sft": SFTConfig, "dpo": DPOConfig
}  # fmt: skip
