"""KL divergence from the reference policy: estimators, their gradients as a loss, and the adaptive coefficient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.config.algorithm import KLEstimator, KLGradient

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
