"""Off-policy corrections: which proximal policy a ratio is taken to, and how far tokens that another policy sampled
count.

w = pi_proximal / pi_behaviour of a token, of its sequence (product) or its geometric mean over the sequence. Dropped
tokens keep their place in the denominators. Nothing here has a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from core.algorithms.policy_losses import MAX_LOG_RATIO, Terms
from core.config.algorithm import AlgorithmSettings

PROXIMAL_SHARE = "proximal_share"
"""Field [T] of proximal=loglinear."""
SMALL_CHANGE = "small_change"
"""Field [T] bool of m2po_threshold: the tokens to keep."""


def proximal_logprobs(logprobs: Tensor, fields: Mapping[str, Tensor], settings: AlgorithmSettings) -> Tensor:
    """Return the log-probabilities of the proximal policy, [t]: recomputed at the start of the step; interpolated
    between behaviour and current policy; or the current policy, where the step has one update."""
    if settings.correction != "bypass" and settings.proximal == "loglinear":
        rollout = fields["rollout_logprobs"]
        return rollout + fields[PROXIMAL_SHARE] * (logprobs.detach() - rollout)
    if settings.correction != "bypass" and settings.proximal == "reused":
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
    elif settings.correction == "decoupled" and settings.behave_imp_weight_cap is not None:
        kept = kept & (weight <= settings.behave_imp_weight_cap)
    if settings.opsm_threshold is not None:
        kept = kept & ~_far_negative(terms, settings.opsm_threshold)
    if settings.m2po_threshold is not None:
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
