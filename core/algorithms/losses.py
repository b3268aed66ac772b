"""Losses as pure functions of per-token tensors: the policy losses, their off-policy corrections, KL divergence and
entropy. They return weighted sums over the trained tokens; the engine divides once.

Every function takes the output of one forward pass; nothing here depends on microbatches, ranks, versions or the order
of sequences. What needs whole sequences takes their sums from `Sequences`. Weights are the field "token_weights";
without it every trained token weighs 1.

A correction weighs a token by w = pi_proximal / pi_behaviour of the token, of its sequence (product) or its geometric
mean over the sequence. Dropped tokens keep their place in the denominators. Corrections have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.config.algorithm import AlgorithmSettings, KLEstimator, KLGradient
from mcore_adapter.data.batch import TOKEN_WEIGHTS, ModelOutput, Sequences

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


def turn_scores(batch: RolloutBatch, sequence: Tensor, settings: AlgorithmSettings) -> Tensor:
    """Compute the reward of each turn, [K], scaled as that of its sequence. `sequence`: its number, [K]."""
    if batch.turn_rewards is None:
        return torch.zeros(len(sequence))
    scaled = torch.tensor(batch.turn_rewards) * settings.reward_output_scaling
    return torch.where(torch.tensor(batch.no_eos)[sequence], 0.0, scaled) if settings.mask_no_eos_with_zero else scaled


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


MAX_SEQUENCE_LOG_RATIO = 10.0
"""The logarithm of a sequence's ratio is cut off here: exp(10) is 22026."""
MAX_LOG_RATIO = 20.0
"""The logarithm of a token's ratio is cut off at plus and minus this value."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a policy loss is computed from, [t] each."""

    logprobs: Tensor
    """Of the current policy; the only one with a gradient."""
    old_logprobs: Tensor
    """Of the proximal policy."""
    rollout_logprobs: Tensor
    """Of the behaviour policy."""
    advantages: Tensor
    loss_mask: Tensor
    sequences: Sequences
    log_ratio: Tensor
    """Current over proximal policy, 0 outside loss_mask."""
    ratio: Tensor
    """exp(log_ratio), of the token or of its sequence."""


PolicyLoss = Callable[[Terms, AlgorithmSettings], tuple[Tensor, Tensor]]
"""-> (loss [t], whether the token is clipped [t])."""


def clip(terms: Terms, settings: AlgorithmSettings) -> tuple[Tensor, Tensor]:
    """Compute max(-A r, -A clip(r, 1 - low, 1 + high)); with dual_clip c, at most -c A where A < 0.

    Source: Schulman et al. 2017, eq. 7; the dual clip, Ye et al. 2020."""
    low, high = settings.clip_range
    unclipped = -terms.advantages * terms.ratio
    clipped = -terms.advantages * terms.ratio.clamp(1.0 - low, 1.0 + high)
    loss, is_clipped = torch.maximum(unclipped, clipped), clipped > unclipped
    if settings.dual_clip:
        most = -settings.dual_clip * terms.advantages
        cut = (terms.advantages < 0) & (loss > most)
        loss, is_clipped = torch.where(cut, most, loss), is_clipped | cut
    return loss, is_clipped


def cispo(terms: Terms, settings: AlgorithmSettings) -> tuple[Tensor, Tensor]:
    """Compute -sg(clip(r, 1 - low, 1 + high)) A log pi: every token keeps a gradient. Source: MiniMax-M1."""
    low, high = settings.clip_range
    ratio = terms.ratio.detach()
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    return -weight * terms.advantages * _own(terms), weight != ratio


def sapo(terms: Terms, settings: AlgorithmSettings) -> tuple[Tensor, Tensor]:
    """Compute -(4 / tau) sigmoid(tau (r - 1)) A, with one tau for A > 0 and another one else; its gradient is -A at
    r = 1."""
    tau = torch.where(terms.advantages > 0, settings.sapo_tau_positive, settings.sapo_tau_negative)
    gate = torch.sigmoid(tau * (terms.ratio - 1.0)) * (4.0 / tau)
    return -gate * terms.advantages, torch.zeros_like(terms.loss_mask)


def topr(terms: Terms, settings: AlgorithmSettings) -> tuple[Tensor, Tensor]:
    """Compute -A log pi where A > 0, -sg(clip(r, 0, 1)) A log pi else; ratios of tokens, as in Trinity-RFT and
    ROLL."""
    ratio = terms.ratio.detach()
    weight = torch.where(terms.advantages > 0, 1.0, ratio.clamp(0.0, 1.0))
    return -weight * terms.advantages * _own(terms), (terms.advantages <= 0) & (ratio > 1.0)


def opmd(terms: Terms, settings: AlgorithmSettings) -> tuple[Tensor, Tensor]:
    """Compute -A log pi / (1 + tau). Source: Trinity-RFT, opmd_policy_loss.py."""
    return -terms.advantages * _own(terms) / (1.0 + settings.opmd_tau), torch.zeros_like(terms.loss_mask)


def kimi(terms: Terms, settings: AlgorithmSettings) -> tuple[Tensor, Tensor]:
    """Compute (-A log pi + tau / 2 (sum over the sequence of log pi - log pi_old)^2 / L) / max(1, tau).

    The square of a sequence is spread evenly over its L trained tokens, so that their sum is the square."""
    counts = terms.sequences.sum(terms.loss_mask).clamp(min=1)
    squares = terms.sequences.sum(terms.log_ratio).square() / counts
    tau = settings.opmd_tau
    loss = -terms.advantages * _own(terms) + 0.5 * tau * terms.sequences.spread(squares)
    return loss / max(1.0, tau), torch.zeros_like(terms.loss_mask)


def tv(terms: Terms, settings: AlgorithmSettings) -> tuple[Tensor, Tensor]:
    """Compute -A sg(min(r, cap)) log pi inside a trust region of the binary total variation, 0 outside: the probability
    of the token may rise by at most clip_high where A > 0, and fall by at most clip_low else. Source: DPPO, as in
    verl."""
    low, high = settings.clip_range
    change = _own(terms).detach().exp() - torch.where(terms.loss_mask, terms.old_logprobs, 0.0).exp()
    kept = torch.where(terms.advantages > 0, change <= high, change >= -low)
    weight = terms.ratio.detach().clamp(max=settings.ratio_cap) * kept
    return -weight * terms.advantages * _own(terms), ~kept


def _own(terms: Terms) -> Tensor:
    """Return the log-probabilities, 0 outside loss_mask."""
    return torch.where(terms.loss_mask, terms.logprobs, 0.0)


POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "clip": clip, "cispo": cispo, "sapo": sapo, "topr": topr, "opmd": opmd, "kimi": kimi, "tv": tv,
}  # fmt: skip

PROXIMAL_SHARE = "proximal_share"
"""Field [T] of proximal=loglinear."""
SMALL_CHANGE = "small_change"
"""Field [T] bool of m2po_threshold: the tokens to keep."""


def proximal_logprobs(logprobs: Tensor, fields: Mapping[str, Tensor], settings: AlgorithmSettings) -> Tensor:
    """Return the log-probabilities of the proximal policy, [t]: recomputed at the start of the step; interpolated
    between behaviour and current policy; or the current policy, where the step has one update."""
    if settings.proximal_policy == "loglinear":
        rollout = fields["rollout_logprobs"]
        return rollout + fields[PROXIMAL_SHARE] * (logprobs.detach() - rollout)
    if settings.proximal_policy == "reused":
        return logprobs.detach()
    return fields.get("old_logprobs", logprobs.detach())


def proximal_share(ages: Tensor) -> Tensor:
    """Return how far the proximal policy is from the behaviour policy on the way to the current one, from the ages [T]
    of tokens in steps: age / (age + 1), 0 for prompts. Source: AReaL, actor.py."""
    ages = ages.clamp(min=0)
    return ages / (ages + 1.0)


def small_changes(log_weights: Tensor, loss_mask: Tensor, threshold: float) -> Tensor:
    """Drop the tokens of the largest squares until their mean over the kept ones is at most `threshold`: [T] bool.

    Source: M2PO (Zheng et al. 2025), as in AReaL. `log_weights`: log pi_proximal - log pi_behaviour, [T]."""
    squares = torch.where(loss_mask, log_weights.double().square(), 0.0)
    ordered = squares[loss_mask].sort().values
    means = ordered.cumsum(0) / torch.arange(1, ordered.numel() + 1)
    within = int((means <= threshold).sum())  # means of a growing sequence grow
    if within == ordered.numel():
        return loss_mask
    return loss_mask & (squares < ordered[within])  # all of equal squares or none, whatever the order of tokens


def behaviour_log_weight(terms: Terms) -> Tensor:
    """Compute log pi_proximal - log pi_behaviour of every token, 0 outside loss_mask: [t]."""
    return torch.where(terms.loss_mask, (terms.old_logprobs - terms.rollout_logprobs).detach(), 0.0)


def correction_weights(
    terms: Terms, fields: Mapping[str, Tensor], settings: AlgorithmSettings
) -> tuple[Tensor, Tensor]:
    """Compute (weight of each token [t], whether it is kept [t] bool) that the policy loss is multiplied by."""
    log_weight = behaviour_log_weight(terms)
    weight, kept = log_weight.exp(), terms.loss_mask
    if settings.correction == "none":
        weight = torch.ones_like(weight)
    elif settings.correction not in ("bypass", "decoupled"):
        weight, kept = _bounded(log_weight, terms, settings)
    elif settings.correction == "decoupled":
        kept = kept & (weight <= settings.bounds[1])
    if settings.opsm_threshold is not None:
        kept = kept & ~_far_negative(terms, settings.opsm_threshold)
    if SMALL_CHANGE in fields:
        kept = kept & fields[SMALL_CHANGE].bool()
    return weight, kept


def _bounded(log_weight: Tensor, terms: Terms, settings: AlgorithmSettings) -> tuple[Tensor, Tensor]:
    """Truncate importance weights (tis), or drop the tokens whose weights are outside the bounds (mis, icepop)."""
    sequences, mask = terms.sequences, terms.loss_mask
    token = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    (low, high), level = settings.bounds, settings.level
    weight = measured = token
    if level == "sequence":
        weight = measured = sequences.spread(sequences.sum(log_weight).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp())
    elif level == "geometric":
        measured = sequences.spread(sequences.mean(log_weight, mask).exp())
    kept = mask
    if settings.correction == "tis":
        weight = weight.clamp(low, high)
    else:
        kept = kept & (measured >= low) & (measured <= high)
    if settings.correction_veto:
        vetoes = sequences.sum((mask & (token < settings.correction_veto)).float())
        kept = kept & (sequences.spread(vetoes) == 0)
    return weight, kept


def _far_negative(terms: Terms, threshold: float) -> Tensor:
    """Find tokens with A < 0 of sequences whose mean of log pi_behaviour - log pi exceeds the threshold: [t] bool.

    Source: DeepSeek-V3.2, off-policy sequence masking."""
    difference = torch.where(terms.loss_mask, (terms.rollout_logprobs - terms.logprobs).detach(), 0.0)
    mean = terms.sequences.mean(difference, terms.loss_mask)
    return (terms.advantages < 0) & (terms.sequences.spread(mean) > threshold)


def trained_weights(fields: Mapping[str, Tensor]) -> Tensor:
    """Return the weight of each trained token, [t] float, 0 elsewhere."""
    mask = fields["loss_mask"]
    return fields[TOKEN_WEIGHTS] * mask if TOKEN_WEIGHTS in fields else mask.float()


def policy_terms(
    output: ModelOutput, fields: Mapping[str, Tensor], sequences: Sequences, settings: AlgorithmSettings
) -> Terms:
    """Collect what the policy loss of a microbatch is computed from. The ratios of sequences are those of GSPO:

    s_i = exp(mean over the trained tokens of sequence i of log pi - log pi_old); each token has the ratio
    sg(s_i) * pi / sg(pi), whose value is s_i and whose gradient is s_i times that of its own log-probability. Source:
    Zheng et al. 2025, the GSPO-token form."""
    assert output.logprobs is not None, "the actor's engine returns log-probabilities"
    logprobs, loss_mask = output.logprobs, fields["loss_mask"]
    old_logprobs = proximal_logprobs(logprobs, fields, settings)
    log_ratio = torch.where(loss_mask, logprobs - old_logprobs, 0.0)
    if settings.ratio == "sequence":
        of_sequence = sequences.spread(sequences.mean(log_ratio.detach(), loss_mask))
        own = torch.where(loss_mask, logprobs - logprobs.detach(), 0.0)
        ratio = (of_sequence + own).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    else:
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return Terms(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        rollout_logprobs=fields["rollout_logprobs"],
        advantages=fields["advantages"],
        loss_mask=loss_mask,
        sequences=sequences,
        log_ratio=log_ratio,
        ratio=ratio,
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
            settings.kl_estimator_of_loss, settings.kl_gradient,
        )  # fmt: skip
        kl = (estimate * weights).sum()
        loss = loss + settings.kl_coeff * kl
        if not settings.kl_in_reward:  # which reports its own, before the update: kl_target is compared with that
            metrics["ref_kl"] = kl.detach()
    if settings.entropy_coeff != 0.0:
        assert output.entropy is not None, "the entropy is computed whenever its coefficient is not 0"
        entropy = (output.entropy * weights).sum()
        loss = loss - settings.entropy_coeff * entropy
        metrics["entropy"] = entropy.detach()
    return loss, metrics
