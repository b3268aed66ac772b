"""Losses as pure functions of per-token tensors. They return sums over the trained tokens; the engine divides once.

Every function takes the output of one forward pass and returns (loss sum, metric sums); nothing here knows about
microbatches, ranks or versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mcore_adapter.engine import ModelOutput

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) in nats, [T]. Source: J. Schulman, "Approximating KL divergence"
    (2020): k1 = log p - log q, k2 = (log p - log q)^2 / 2, k3 = q/p - 1 - log(q/p)."""
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(-log_ratio) + log_ratio


def ppo_policy_loss(
    logprobs: Tensor,  # [T] current policy
    old_logprobs: Tensor,  # [T] trainer, start of batch (proximal)
    rollout_logprobs: Tensor,  # [T] generator (behaviour)
    advantages: Tensor,  # [T]
    loss_mask: Tensor,  # [T] bool
    *,
    eps_clip: float,
    behave_imp_weight_cap: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate with the decoupled objective. Source: Schulman et al. 2017, eq. 7; for the behaviour weight
    pi_prox / pi_behave, Hilton et al. 2022 ("Batch size-invariance for policy optimization"), as in AReaL.

    The ratio is clipped around the proximal policy; each token is weighted by proximal over behaviour. Tokens whose
    weight exceeds `behave_imp_weight_cap` do not contribute. With rollout_logprobs == old_logprobs this is plain PPO.
    """
    ratio = torch.exp(torch.where(loss_mask, logprobs - old_logprobs, 0.0))
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip)
    behave_log_weight = torch.where(loss_mask, old_logprobs - rollout_logprobs, 0.0)
    behave_weight = behave_log_weight.exp()
    kept = loss_mask
    if behave_imp_weight_cap is not None:
        kept = loss_mask & (behave_weight <= behave_imp_weight_cap)
    loss = (torch.maximum(unclipped, clipped) * behave_weight * kept).sum()
    with torch.no_grad():
        metrics = {
            "actor_loss": loss.detach(),
            "ppo_approx_kl": ((logprobs - old_logprobs) * loss_mask).sum(),
            "actor_clip_ratio": ((clipped > unclipped) & loss_mask).sum(),
            "importance_weight": (ratio * loss_mask).sum(),
            "behave_imp_weight": (behave_weight * loss_mask).sum(),
            "behave_approx_kl": (behave_log_weight * loss_mask).sum(),
            "behave_capped_ratio": (loss_mask & ~kept).sum(),
        }
    return loss, metrics


def ppo_loss(
    output: ModelOutput,
    fields: Mapping[str, Tensor],
    *,
    eps_clip: float,
    behave_imp_weight_cap: float | None,
    kl_coeff: float,
    kl_estimator: KLEstimator,
    entropy_coeff: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The actor's loss: clipped surrogate, plus kl_coeff * KL to `ref_logprobs`, minus entropy_coeff * entropy.

    Where `fields` has no old_logprobs, the batch is one minibatch, and the proximal policy is the current one.
    """
    assert output.logprobs is not None, "the actor's engine returns log-probabilities"
    mask = fields["loss_mask"]
    old_logprobs = fields.get("old_logprobs", output.logprobs.detach())
    loss, metrics = ppo_policy_loss(
        output.logprobs,
        old_logprobs,
        fields["rollout_logprobs"],
        fields["advantages"],
        mask,
        eps_clip=eps_clip,
        behave_imp_weight_cap=behave_imp_weight_cap,
    )
    if kl_coeff != 0.0:
        kl = (kl_estimate(output.logprobs, fields["ref_logprobs"], kl_estimator) * mask).sum()
        loss = loss + kl_coeff * kl
        metrics["ref_kl"] = kl.detach()
    if entropy_coeff != 0.0:
        assert output.entropy is not None, "entropy is asked for whenever its coefficient is not 0"
        entropy = (output.entropy * mask).sum()
        loss = loss - entropy_coeff * entropy
        metrics["entropy"] = entropy.detach()
    return loss, metrics


def value_loss(
    output: ModelOutput, fields: Mapping[str, Tensor], *, value_eps_clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped squared error of the critic against `returns`, around the values of the start of the batch
    (`old_values`). Source: Schulman et al.'s PPO2 code, 0.5 * max((v - R)^2, (clip(v) - R)^2)."""
    assert output.values is not None, "the critic's engine returns values"
    mask, returns, old_values = fields["loss_mask"], fields["returns"], fields["old_values"]
    clipped_values = old_values + (output.values - old_values).clamp(-value_eps_clip, value_eps_clip)
    unclipped = (output.values - returns).square()
    clipped = (clipped_values - returns).square()
    loss = (0.5 * torch.maximum(unclipped, clipped) * mask).sum()
    metrics = {
        "value_loss": loss.detach(),
        "value_clip_ratio": ((clipped > unclipped) & mask).sum(),
        "values": (output.values.detach() * mask).sum(),
    }
    return loss, metrics


def sft_loss(output: ModelOutput, fields: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the answer tokens, in nats."""
    assert output.logprobs is not None, "the model's engine returns log-probabilities"
    loss = -(output.logprobs * fields["loss_mask"]).sum()
    return loss, {"nll": loss.detach()}


LossFn = Callable[["ModelOutput", Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]
