"""Losses as pure functions of per-token tensors. They return weighted sums over the trained tokens; the engine
divides once.

Every function takes the output of one forward pass and returns (loss sum, metric sums); nothing here depends on
microbatches, ranks or versions. Weights are the field "token_weights"; without it every trained token weighs 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from mcore_adapter.data.weights import TOKEN_WEIGHTS

if TYPE_CHECKING:
    from mcore_adapter.data.sequences import Sequences
    from mcore_adapter.engine import ModelOutput

KLEstimator = Literal["k1", "k2", "k3"]


def trained_weights(fields: Mapping[str, Tensor]) -> Tensor:
    """Return the weight of each trained token, [t] float, 0 elsewhere."""
    mask = fields["loss_mask"]
    return fields[TOKEN_WEIGHTS] * mask if TOKEN_WEIGHTS in fields else mask.float()


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) per token in nats, [T]. Source: J. Schulman, "Approximating KL divergence"
    (2020): k1 = log p - log q, k2 = (log p - log q)^2 / 2, k3 = q/p - 1 - log(q/p)."""
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(-log_ratio) + log_ratio


def clipped_surrogate(
    ratio: Tensor,  # [t] what is clipped: of a token, or of its sequence
    log_ratio: Tensor,  # [t] current over proximal policy, of each token
    old_logprobs: Tensor,  # [t] trainer, start of batch (proximal)
    rollout_logprobs: Tensor,  # [t] generator (behaviour)
    advantages: Tensor,  # [t]
    loss_mask: Tensor,  # [t] bool
    weights: Tensor,  # [t], 0 outside loss_mask
    *,
    clip_low: float,
    clip_high: float,
    behave_imp_weight_cap: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped surrogate of these ratios and its metrics: weighted sums over the trained tokens.

    Each token is weighted by proximal over behaviour; tokens whose weight exceeds `behave_imp_weight_cap` do not
    contribute. Source: Hilton et al. 2022 ("Batch size-invariance for policy optimization"), as in AReaL."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    behave_log_weight = torch.where(loss_mask, old_logprobs - rollout_logprobs, 0.0)
    behave_weight = behave_log_weight.exp()
    kept = loss_mask
    if behave_imp_weight_cap is not None:
        kept = loss_mask & (behave_weight <= behave_imp_weight_cap)
    loss = (torch.maximum(unclipped, clipped) * behave_weight * (kept * weights)).sum()
    with torch.no_grad():
        metrics = {
            "actor_loss": loss.detach(),
            "ppo_approx_kl": (log_ratio * weights).sum(),
            "actor_clip_ratio": ((clipped > unclipped) * weights).sum(),
            "importance_weight": (ratio * weights).sum(),
            "behave_imp_weight": (behave_weight * weights).sum(),
            "behave_approx_kl": (behave_log_weight * weights).sum(),
            "behave_capped_ratio": (~kept * weights).sum(),
        }
    return loss, metrics


def ppo_policy_loss(
    logprobs: Tensor,  # [T] current policy
    old_logprobs: Tensor,  # [T] trainer, start of batch (proximal)
    rollout_logprobs: Tensor,  # [T] generator (behaviour)
    advantages: Tensor,  # [T]
    loss_mask: Tensor,  # [T] bool
    *,
    eps_clip: float,
    behave_imp_weight_cap: float | None,
    weights: Tensor | None = None,  # [T], 0 outside loss_mask
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the clipped surrogate with the decoupled objective. Source: Schulman et al. 2017, eq. 7; for the behavior
    weight pi_prox / pi_behave, Hilton et al. 2022 ("Batch size-invariance for policy optimization"), as in AReaL.

    The ratio is clipped around the proximal policy; each token is weighted by proximal over behaviour. Tokens whose
    weight exceeds `behave_imp_weight_cap` do not contribute. With rollout_logprobs == old_logprobs this is plain PPO.
    """
    weights = loss_mask.float() if weights is None else weights
    log_ratio = torch.where(loss_mask, logprobs - old_logprobs, 0.0)
    ratio = torch.exp(log_ratio)
    return clipped_surrogate(
        ratio, log_ratio, old_logprobs, rollout_logprobs, advantages, loss_mask, weights,
        clip_low=eps_clip, clip_high=eps_clip, behave_imp_weight_cap=behave_imp_weight_cap,
    )  # fmt: skip


def ppo_loss(
    output: ModelOutput,
    fields: Mapping[str, Tensor],
    sequences: Sequences | None = None,
    *,
    eps_clip: float,
    behave_imp_weight_cap: float | None,
    kl_coeff: float,
    kl_estimator: KLEstimator,
    entropy_coeff: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the actor's loss: clipped surrogate, plus kl_coeff * KL to `ref_logprobs`, minus entropy_coeff * entropy.

    Where `fields` has no old_logprobs, the batch is one minibatch, and the proximal policy is the current one.
    """
    assert output.logprobs is not None, "the actor's engine returns log-probabilities"
    old_logprobs = fields.get("old_logprobs", output.logprobs.detach())
    loss, metrics = ppo_policy_loss(
        output.logprobs,
        old_logprobs,
        fields["rollout_logprobs"],
        fields["advantages"],
        fields["loss_mask"],
        eps_clip=eps_clip,
        behave_imp_weight_cap=behave_imp_weight_cap,
        weights=trained_weights(fields),
    )
    loss, added = regularised(
        loss, output, fields, kl_coeff=kl_coeff, kl_estimator=kl_estimator, entropy_coeff=entropy_coeff
    )
    return loss, metrics | added


def regularised(
    loss: Tensor,
    output: ModelOutput,
    fields: Mapping[str, Tensor],
    *,
    kl_coeff: float,
    kl_estimator: KLEstimator,
    entropy_coeff: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Add kl_coeff * KL to `ref_logprobs` and -entropy_coeff * entropy to a loss, where the coefficients are not 0."""
    assert output.logprobs is not None, "the actor's engine returns log-probabilities"
    weights = trained_weights(fields)
    metrics: dict[str, Tensor] = {}
    if kl_coeff != 0.0:
        kl = (kl_estimate(output.logprobs, fields["ref_logprobs"], kl_estimator) * weights).sum()
        loss = loss + kl_coeff * kl
        metrics["ref_kl"] = kl.detach()
    if entropy_coeff != 0.0:
        assert output.entropy is not None, "the entropy is computed whenever its coefficient is not 0"
        entropy = (output.entropy * weights).sum()
        loss = loss - entropy_coeff * entropy
        metrics["entropy"] = entropy.detach()
    return loss, metrics


def value_loss(
    output: ModelOutput,
    fields: Mapping[str, Tensor],
    sequences: Sequences | None = None,
    *,
    value_eps_clip: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the clipped squared error of the critic against `returns`, around the values of the start of the batch
    (`old_values`). Source: Schulman et al.'s PPO2 code, 0.5 * max((v - R)^2, (clip(v) - R)^2)."""
    assert output.values is not None, "the critic's engine returns values"
    weights, returns, old_values = trained_weights(fields), fields["returns"], fields["old_values"]
    clipped_values = old_values + (output.values - old_values).clamp(-value_eps_clip, value_eps_clip)
    unclipped = (output.values - returns).square()
    clipped = (clipped_values - returns).square()
    loss = (0.5 * torch.maximum(unclipped, clipped) * weights).sum()
    metrics = {
        "value_loss": loss.detach(),
        "value_clip_ratio": ((clipped > unclipped) * weights).sum(),
        "values": (output.values.detach() * weights).sum(),
    }
    return loss, metrics


def sft_loss(
    output: ModelOutput, fields: Mapping[str, Tensor], sequences: Sequences | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the negative log-likelihood of the answer tokens, in nats."""
    assert output.logprobs is not None, "the model's engine returns log-probabilities"
    loss = -(output.logprobs * trained_weights(fields)).sum()
    return loss, {"nll": loss.detach()}
