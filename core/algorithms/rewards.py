"""From rewards of answers to scores: shaping, the penalty of overlong answers, the KL divergence from the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.config.algorithm import AlgorithmSettings, KLEstimator, KLGradient

if TYPE_CHECKING:
    from core.data.rollout_batch import RolloutBatch

MAX_RATIO = 10.0
"""kl_gradient=ratio: largest ratio that an estimate is multiplied by."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) per token in nats, [T]. Source: J. Schulman, "Approximating KL divergence"
    (2020): k1 = log p - log q, k2 = (log p - log q)^2 / 2, k3 = q/p - 1 - log(q/p). low_var is k3 with the logarithm
    clamped to +-20 and the result to +-10, as in verl."""
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "low_var":
        log_ratio = log_ratio.clamp(-20.0, 20.0)
        return (torch.expm1(-log_ratio) + log_ratio).clamp(-10.0, 10.0)
    return torch.expm1(-log_ratio) + log_ratio


def kl_loss(
    logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor, estimator: KLEstimator, gradient: KLGradient
) -> Tensor:
    """Estimate each token, [t], with the estimator's `own` gradient; with that of k2, which is the gradient of the KL
    divergence on policy; or multiplied by the live `ratio` [t] of current to proximal policy (up to MAX_RATIO), which
    has it off policy as well (DeepSeek-V3.2)."""
    estimate = kl_estimate(logprobs, ref_logprobs, estimator)
    if gradient == "k2":
        square = kl_estimate(logprobs, ref_logprobs, "k2")
        return estimate.detach() + square - square.detach()
    return estimate * ratio.clamp(max=MAX_RATIO) if gradient == "ratio" else estimate


@dataclass
class AdaptiveKL:
    """A coefficient that follows the measured divergence. Source: Ziegler et al. 2019, section 2.2."""

    coefficient: float
    target: float | None
    """None: the coefficient is constant."""
    horizon: float

    def update(self, divergence: float, num_sequences: int) -> None:
        """Raise the coefficient by at most a fifth of num_sequences / horizon where the divergence exceeds the target,
        lower it where it is below."""
        if self.target is not None:
            error = min(max(divergence / self.target - 1.0, -0.2), 0.2)
            self.coefficient *= 1.0 + error * num_sequences / self.horizon


def overlong_penalty(
    lens: Tensor,  # [N] tokens of each completion
    *,
    max_tokens: int,
    share: float,
    factor: float,
) -> Tensor:
    """Compute what the score of a completion gains (at most 0) in the last `share` of max_tokens: it falls linearly to
    -factor at max_tokens, [N]. Source: Yu et al. 2025 (DAPO), eq. 13."""
    buffer = share * max_tokens
    return (-(lens - (max_tokens - buffer)) / buffer * factor).clamp(-factor, 0.0)


def sequence_scores(batch: RolloutBatch, settings: AlgorithmSettings) -> Tensor:
    """Compute (reward - reward_output_bias) * reward_output_scaling of each sequence, 0 for completions that the length
    limit cut off with mask_no_eos_with_zero: [N]."""
    shaped = (torch.tensor(batch.rewards) - settings.reward_output_bias) * settings.reward_output_scaling
    return torch.where(torch.tensor(batch.no_eos), 0.0, shaped) if settings.mask_no_eos_with_zero else shaped


def token_divergence(fields: Mapping[str, Tensor], settings: AlgorithmSettings) -> Tensor | None:
    """Estimate the KL divergence of each token, [T]; None where the KL divergence is not part of the reward."""
    if not settings.kl_in_reward:
        return None
    return kl_estimate(fields["old_logprobs"], fields["ref_logprobs"], settings.kl_estimator_of_reward)


def reward_metrics(
    task_reward: Tensor,
    kl_penalty: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    num_sequences: int,
    settings: AlgorithmSettings,
) -> dict[str, float]:
    """Return the metrics of rewards and advantages that every step reports."""
    kl_reward = -(kl_penalty * mask).sum() / num_sequences if kl_penalty is not None else torch.zeros(())
    return {
        "task_reward": float(task_reward),
        "kl_reward": float(kl_reward),
        "final_reward": float(task_reward + kl_reward),
        "advantage": float(advantages.sum() / mask.sum().clamp(min=1)),
        "disable_value": float(settings.disable_value),
        "mask_no_eos_with_zero": float(settings.mask_no_eos_with_zero),
    }


def token_rewards(
    scores: Tensor,  # [N]
    cu_seqlens: Tensor,  # [N + 1]
    loss_mask: Tensor,  # [T] bool
    *,
    kl_penalty: Tensor | None,  # [T], subtracted where trained
) -> Tensor:
    """Place the score on the last token of each sequence, minus the KL penalty on every trained token: [T]."""
    rewards = torch.zeros(loss_mask.numel())
    if kl_penalty is not None:
        rewards -= kl_penalty * loss_mask
    rewards[cu_seqlens[1:] - 1] += scores
    return rewards
