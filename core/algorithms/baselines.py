"""From the scores of answers to advantages: each is compared with the other answers to its prompt. Pure functions of
scores [N] and group ids [N]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from core.config.algorithm import AlgorithmSettings


def group_means(scores: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of the group of each sequence, and the number of sequences in it: [N] each."""
    num_groups = int(group_ids.max()) + 1
    count = torch.zeros(num_groups).index_add_(0, group_ids, torch.ones_like(scores)).clamp(min=1)
    mean = torch.zeros(num_groups).index_add_(0, group_ids, scores) / count
    return mean[group_ids], count[group_ids]


def centred(
    scores: Tensor, group_ids: Tensor, *, std: Literal["none", "group", "batch"] = "group", eps: float = 1e-6
) -> Tensor:
    """Divide (score - mean of its group) by (standard deviation + eps), that of a sample (n - 1) of its group or of the
    batch, or by nothing; 0 in a group of one: [N].

    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2; std=none: Liu et al. 2025 (Dr. GRPO)."""
    means, counts = group_means(scores, group_ids)
    difference = scores - means
    if std == "none":
        return difference
    if std == "batch":
        return difference / (scores.std() + eps) if scores.numel() > 1 else difference
    variance = group_means(difference.square(), group_ids)[0] * counts / (counts - 1).clamp(min=1)
    return difference / (variance.sqrt() + eps)


def leave_one_out(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Subtract the mean of the other scores of its group: n / (n - 1) * (score - mean of the group); 0 if n = 1: [N].

    Source: Ahmadian et al. 2024 (RLOO)."""
    means, counts = group_means(scores, group_ids)
    return torch.where(counts > 1, counts / (counts - 1).clamp(min=1) * (scores - means), 0.0)


def log_average_exp(scores: Tensor, group_ids: Tensor, *, tau: float) -> Tensor:
    """Compute score - tau * log(mean of exp(score / tau) over its group): [N]. Source: Trinity-RFT (OPMD)."""
    highest = torch.full((int(group_ids.max()) + 1,), -torch.inf).scatter_reduce(0, group_ids, scores, "amax")
    highest = highest[group_ids]
    mean, _ = group_means(((scores - highest) / tau).exp(), group_ids)
    return scores - highest - tau * mean.log()


def maximum_likelihood(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Compute (score - mean of its group) / (mean of its group - b), 0 where the mean is b: [N].

    b = min(0, lowest score): the formula is for scores of 0 and 1, where b = 0, and gives the same advantages for
    scores of -1 and 1. Without b, division by a negative mean would reverse the signs. Source: prime-rl (MaxRL)."""
    means, _ = group_means(scores, group_ids)
    above = means - scores.min().clamp(max=0.0)
    return torch.where(above < 1e-6, 0.0, (scores - means) / above.clamp(min=1e-6))


Baseline = Callable[[Tensor, Tensor, AlgorithmSettings], Tensor]

BASELINES: Mapping[str, Baseline] = {
    "gae": lambda scores, ids, s: centred(scores, ids) if s.group_adv_norm else scores,
    "returns": lambda scores, ids, s: scores,
    "group": lambda scores, ids, s: centred(scores, ids, std=s.advantage_std),
    "leave_one_out": lambda scores, ids, s: leave_one_out(scores, ids),
    "logavgexp": lambda scores, ids, s: log_average_exp(scores, ids, tau=s.opmd_tau),
    "maxrl": lambda scores, ids, s: maximum_likelihood(scores, ids),
}
"""By the value of algorithm.advantage."""
