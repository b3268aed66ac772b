"""Policy losses as pure functions: a loss of every token, before corrections and before tokens are aggregated.

Invariant: nothing here depends on microbatches, ranks or the order of sequences; what needs whole sequences takes their
sums from `Sequences`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.config.algorithm import AlgorithmSettings
from mcore_adapter.data.sequences import Sequences

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


def make_terms(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sequences: Sequences,
    *,
    of_sequences: bool,
) -> Terms:
    """Fill in the ratios; `of_sequences`: those of GSPO.

    s_i = exp(mean over the trained tokens of sequence i of log pi - log pi_old); each token has the ratio
    sg(s_i) * pi / sg(pi), whose value is s_i and whose gradient is s_i times that of its own log-probability. Source:
    Zheng et al. 2025, the GSPO-token form."""
    log_ratio = torch.where(loss_mask, logprobs - old_logprobs, 0.0)
    if of_sequences:
        of_sequence = sequences.spread(sequences.mean(log_ratio.detach(), loss_mask))
        own = torch.where(loss_mask, logprobs - logprobs.detach(), 0.0)
        ratio = (of_sequence + own).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    else:
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return Terms(
        logprobs=logprobs, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages,
        loss_mask=loss_mask, sequences=sequences, log_ratio=log_ratio, ratio=ratio,
    )  # fmt: skip


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
