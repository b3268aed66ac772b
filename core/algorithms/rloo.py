"""RLOO: the reward of an answer minus the mean reward of the other answers to its prompt.

Source: Ahmadian et al. 2024, "Back to basics: revisiting REINFORCE-style optimization". Every trained token of an
answer has its advantage; the loss is PPO's clipped surrogate, averaged over tokens. An answer without others has no
baseline and gets advantage 0. With kl_in=reward an answer's reward loses the KL penalties of all its tokens first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.algorithms.advantages import group_means, sequence_advantages
from core.algorithms.base import Metrics, Unit
from core.algorithms.ppo import ConfiguredAlgorithm, clipped_loss
from core.algorithms.settings import COMMON, AlgorithmSettings, read_options

if TYPE_CHECKING:
    from core.data.rollout_batch import RolloutBatch
    from mcore_adapter.data.sequences import Sequences
    from mcore_adapter.forward import ModelOutput


@dataclass(frozen=True, kw_only=True)
class RLOOConfig:
    """algorithm.options of RLOO."""

    normalize: bool = False
    """Whiten advantages over the trained tokens of the batch."""


def leave_one_out(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Compute score - mean of the other scores of its group = n / (n - 1) * (score - mean of the group); 0 if n = 1:
    [N]."""
    means, counts = group_means(scores, group_ids)
    return torch.where(counts > 1, counts / (counts - 1).clamp(min=1) * (scores - means), 0.0)


class RLOO(ConfiguredAlgorithm):
    """Leave-one-out advantages with the clipped loss of PPO."""

    unit: Unit = "group"
    reads = COMMON | {"eps_clip"}

    def __init__(self, settings: AlgorithmSettings, options: Mapping[str, Any]) -> None:
        """Raises ValueError for options that do not fit RLOOConfig."""
        self._config = read_options(RLOOConfig, options)
        self._settings = replace(settings, disable_value=True)

    def advantages(
        self, batch: RolloutBatch, fields: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        return sequence_advantages(
            batch, fields, self._settings, baseline=leave_one_out, normalize=self._config.normalize
        )

    def loss(self, output: ModelOutput, fields: Mapping[str, Tensor], sequences: Sequences) -> tuple[Tensor, Metrics]:
        return clipped_loss(self._settings, output, fields)
