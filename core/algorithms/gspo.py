"""GSPO: PPO whose ratio is that of whole sequences. Source: Zheng et al. 2025, "Group sequence policy optimization".

s_i = exp(mean over the trained tokens of sequence i of log pi - log pi_old); each token has the ratio
sg(s_i) * pi / sg(pi) (the paper's GSPO-token form), whose value is s_i and whose gradient is s_i times that of its own
log-probability. The loss is the mean over sequences of the mean over their trained tokens. Advantages are rewards
normalised over the answers to one prompt, with the standard deviation of a sample (divided by n - 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.algorithms.advantages import group_means, sequence_advantages
from core.algorithms.base import Metrics, Unit
from core.algorithms.losses import clipped_surrogate, regularised, trained_weights
from core.algorithms.ppo import ConfiguredAlgorithm
from core.algorithms.settings import COMMON, AlgorithmSettings, read_options
from mcore_adapter.data.weights import sequence_mean

if TYPE_CHECKING:
    from core.data.rollout_batch import RolloutBatch
    from mcore_adapter.data.batch import PackedBatch
    from mcore_adapter.data.sequences import Sequences
    from mcore_adapter.forward import ModelOutput

MAX_LOG_RATIO = 10.0
"""The logarithm of a ratio is cut off here: exp(10) is 22026."""


@dataclass(frozen=True, kw_only=True)
class GSPOConfig:
    """algorithm.options of GSPO. The ratio of a sequence varies far less than that of a token, so its clip range is
    about a thousandth of PPO's. Source of the defaults: section 5.1 of the paper."""

    clip_low: float = 3e-4
    """The ratio is clipped to 1 - clip_low ..."""
    clip_high: float = 4e-4
    """... 1 + clip_high."""

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"algorithm.options.{name}: must be between 0 and 1, got {getattr(self, name)}")


def standardise(scores: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Compute (score - mean of its group) / (unbiased standard deviation of its group + eps); 0 in a group of one:
    [N]."""
    means, counts = group_means(scores, group_ids)
    centred = scores - means
    variance = group_means(centred.square(), group_ids)[0] * counts / (counts - 1).clamp(min=1)
    return centred / (variance.sqrt() + eps)


def gspo_policy_loss(
    logprobs: Tensor,  # [t] current policy
    old_logprobs: Tensor,  # [t] trainer, start of batch (proximal)
    rollout_logprobs: Tensor,  # [t] generator (behaviour)
    advantages: Tensor,  # [t]
    loss_mask: Tensor,  # [t] bool
    weights: Tensor,  # [t], 0 outside loss_mask
    sequences: Sequences,
    *,
    clip_low: float,
    clip_high: float,
    behave_imp_weight_cap: float | None,
) -> tuple[Tensor, Metrics]:
    """Compute the clipped surrogate of sequence ratios, and its metrics: weighted sums over the trained tokens.

    As in ppo_policy_loss, each token is weighted by proximal over behaviour, up to `behave_imp_weight_cap`."""
    log_ratio = torch.where(loss_mask, logprobs - old_logprobs, 0.0)
    sequence_log_ratio = sequences.spread(sequences.mean(log_ratio.detach(), loss_mask))
    own = torch.where(loss_mask, logprobs - logprobs.detach(), 0.0)
    ratio = (sequence_log_ratio + own).clamp(max=MAX_LOG_RATIO).exp()
    return clipped_surrogate(
        ratio, log_ratio, old_logprobs, rollout_logprobs, advantages, loss_mask, weights,
        clip_low=clip_low, clip_high=clip_high, behave_imp_weight_cap=behave_imp_weight_cap,
    )  # fmt: skip


class GSPO(ConfiguredAlgorithm):
    """Group-normalised rewards with the clipped loss of sequence ratios."""

    unit: Unit = "group"
    reads = COMMON

    def __init__(self, settings: AlgorithmSettings, options: Mapping[str, Any]) -> None:
        """Raises ValueError for options that do not fit GSPOConfig."""
        self._config = read_options(GSPOConfig, options)
        self._settings = replace(settings, disable_value=True)

    def advantages(
        self, batch: RolloutBatch, fields: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        return sequence_advantages(batch, fields, self._settings, baseline=standardise, normalize=False)

    def token_weights(self, minibatch: PackedBatch) -> Tensor:
        return sequence_mean(minibatch)

    def loss(self, output: ModelOutput, fields: Mapping[str, Tensor], sequences: Sequences) -> tuple[Tensor, Metrics]:
        assert output.logprobs is not None, "the actor's engine returns log-probabilities"
        settings = self._settings
        loss, metrics = gspo_policy_loss(
            output.logprobs,
            fields.get("old_logprobs", output.logprobs.detach()),
            fields["rollout_logprobs"],
            fields["advantages"],
            fields["loss_mask"],
            trained_weights(fields),
            sequences,
            clip_low=self._config.clip_low,
            clip_high=self._config.clip_high,
            behave_imp_weight_cap=settings.behave_imp_weight_cap if settings.decoupled else None,
        )
        loss, added = regularised(
            loss, output, fields, kl_coeff=settings.kl_coeff, kl_estimator=settings.kl_estimator,
            entropy_coeff=settings.entropy_coeff,
        )  # fmt: skip
        return loss, metrics | added
