"""Demonstrations (expert data) beside rollouts: a policy gradient and fine-tuning in one loss.

    loss = (1 - mu) * policy loss, mean over rollouts  +  mu * mean over tokens of demonstrations of -phi * log pi

phi is 1 (mix), or p (1 - p) of the token without gradient (chord). Source: Trinity-RFT 0.6, MIX and MIX-CHORD (Zhang et
al. 2025). Invariant: the token weights of a minibatch sum to 1, mu of it on demonstrations, whatever their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from core.config.algorithm import AlgorithmSettings
from mcore_adapter.data.batch import PackedBatch
from mcore_adapter.data.sequences import token_mean

DEMONSTRATION = "demonstration"
"""The field [T] bool of tokens, prompts included, of sequences that no policy sampled."""


def demonstration_weight(step: int, settings: AlgorithmSettings) -> float:
    """Return mu of a step, counted from 0: a linear warm-up from 0 to demonstration_weight, then a cosine to
    demonstration_valley; constant where no steps are set."""
    peak, valley = settings.demonstration_weight, settings.demonstration_valley
    warmup, decay = settings.demonstration_warmup_steps, settings.demonstration_decay_steps
    if step < warmup:
        return peak * step / warmup
    if valley is None or not decay:
        return peak
    done = min((step - warmup) / decay, 1.0)
    return valley + (peak - valley) * 0.5 * (1.0 + math.cos(math.pi * done))


def mixed_weights(minibatch: PackedBatch, of_rollouts: Callable[[PackedBatch], Tensor], mu: float) -> Tensor:
    """Weigh the tokens of rollouts by `of_rollouts`, 1 - mu of all, and those of demonstrations alike: [T] float64.

    A minibatch without one of the two has all its weight on the other."""
    shown = minibatch.fields[DEMONSTRATION][minibatch.cu_seqlens[:-1]].bool()
    weights = torch.zeros(minibatch.num_tokens, dtype=torch.float64)
    parts = ((~shown, of_rollouts, 1.0 - mu), (shown, token_mean, mu))
    weighed = [(chosen.nonzero().flatten().tolist(), weigh, share) for chosen, weigh, share in parts]
    for sequences, weigh, share in weighed:
        if sequences:
            part = weigh(minibatch.select(sequences))
            alone = len(sequences) == minibatch.num_sequences
            weights[minibatch.token_index(sequences)] = part / part.sum().clamp(min=1e-30) * (1.0 if alone else share)
    return weights


def demonstration_loss(
    logprobs: Tensor, weights: Tensor, fields: Mapping[str, Tensor], settings: AlgorithmSettings, mu: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the weighted sum of -phi * log pi over the demonstrations of a microbatch, and their negative
    log-likelihood per token as a metric. `weights` [t] hold mu already, 0 outside loss_mask."""
    shown = torch.where(fields[DEMONSTRATION].bool(), weights, 0.0)
    own = torch.where(shown > 0, logprobs, 0.0)
    phi = torch.ones_like(own)
    if settings.demonstration_loss == "chord":
        p = own.detach().exp()
        phi = p * (1.0 - p)
    loss = -(phi * own * shown).sum()
    return loss, {"demonstration_nll": -(own.detach() * shown).sum() / max(mu, 1e-30)}
