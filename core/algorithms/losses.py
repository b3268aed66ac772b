"""Losses as pure functions of per-token tensors. They return weighted sums over the trained tokens; the engine
divides once.

Every function takes the output of one forward pass and returns (loss sum, metric sums); nothing here depends on
microbatches, ranks or versions. Weights are the field "token_weights"; without it every trained token weighs 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.algorithms.corrections import behaviour_log_weight, correction_weights, proximal_logprobs
from core.algorithms.policy_losses import MAX_LOG_RATIO, POLICY_LOSSES, Terms, make_terms
from core.algorithms.rewards import kl_loss
from core.config.algorithm import AlgorithmSettings
from mcore_adapter.data.sequences import TOKEN_WEIGHTS

if TYPE_CHECKING:
    from mcore_adapter.data.batch import ModelOutput
    from mcore_adapter.data.sequences import Sequences


def trained_weights(fields: Mapping[str, Tensor]) -> Tensor:
    """Return the weight of each trained token, [t] float, 0 elsewhere."""
    mask = fields["loss_mask"]
    return fields[TOKEN_WEIGHTS] * mask if TOKEN_WEIGHTS in fields else mask.float()


def policy_terms(
    output: ModelOutput, fields: Mapping[str, Tensor], sequences: Sequences, settings: AlgorithmSettings
) -> Terms:
    """Collect what the policy loss of a microbatch is computed from."""
    assert output.logprobs is not None, "the actor's engine returns log-probabilities"
    return make_terms(
        output.logprobs,
        proximal_logprobs(output.logprobs, fields, settings),
        fields["rollout_logprobs"],
        fields["advantages"],
        fields["loss_mask"],
        sequences,
        of_sequences=settings.ratio == "sequence",
    )


def policy_loss(
    output: ModelOutput, fields: Mapping[str, Tensor], sequences: Sequences, settings: AlgorithmSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the actor's loss: policy loss times correction, plus KL to the reference, minus entropy bonus.

    Where `fields` has no old_logprobs, the batch is one minibatch, and the proximal policy is the current one."""
    terms = policy_terms(output, fields, sequences, settings)
    weights = trained_weights(fields)
    of_token, clipped = POLICY_LOSSES[settings.loss](terms, settings)
    behave_weight, kept = correction_weights(terms, fields, settings)
    loss = (of_token * behave_weight * (kept * weights)).sum()
    with torch.no_grad():
        behave_log_weight = behaviour_log_weight(terms)
        metrics = {
            "actor_loss": loss.detach(),
            "ppo_approx_kl": (terms.log_ratio * weights).sum(),
            "actor_clip_ratio": (clipped * weights).sum(),
            "importance_weight": (terms.ratio * weights).sum(),
            "behave_imp_weight": (behave_weight * weights).sum(),
            "behave_approx_kl": (behave_log_weight * weights).sum(),
            "behave_capped_ratio": (~kept * weights).sum(),
        }
    loss, added = _regularised(loss, weights, output, terms, fields, settings)
    return loss, metrics | added


def _regularised(
    loss: Tensor,
    weights: Tensor,
    output: ModelOutput,
    terms: Terms,
    fields: Mapping[str, Tensor],
    settings: AlgorithmSettings,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Add KL to `ref_logprobs` and entropy to a loss, where their coefficients are not 0."""
    metrics: dict[str, Tensor] = {}
    if settings.kl_coeff != 0.0:
        estimate = kl_loss(
            terms.logprobs, fields["ref_logprobs"], terms.log_ratio.clamp(max=MAX_LOG_RATIO).exp(),
            settings.loss_kl_estimator, settings.kl_gradient,
        )  # fmt: skip
        kl = (estimate * weights).sum()
        loss = loss + settings.kl_coeff * kl
        metrics["ref_kl"] = kl.detach()
    if settings.entropy_coeff != 0.0:
        assert output.entropy is not None, "the entropy is computed whenever its coefficient is not 0"
        entropy = (output.entropy * weights).sum()
        loss = loss - settings.entropy_coeff * entropy
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
    clipped_values = output.values.clamp(old_values - value_eps_clip, old_values + value_eps_clip)
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
