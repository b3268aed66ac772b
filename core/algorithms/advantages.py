"""From scores to advantages: reward shaping, generalised advantage estimation, normalisation. Pure functions on
packed tensors; `cu_seqlens` says where sequences begin and end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def shape_scores(
    scores: Tensor,  # [N] what the reward function said
    no_eos: Tensor,  # [N] bool, completions cut off by the length limit
    *,
    bias: float,
    scaling: float,
    mask_no_eos_with_zero: bool,
) -> Tensor:
    """(score - bias) * scaling, 0 for cut-off completions when `mask_no_eos_with_zero`: [N]."""
    shaped = (scores - bias) * scaling
    return torch.where(no_eos, torch.zeros_like(shaped), shaped) if mask_no_eos_with_zero else shaped


def group_normalize(scores: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """(score - mean of its group) / (standard deviation of its group + eps): [N]. Source: Shao et al. 2024
    (DeepSeekMath), section 4.1.2, GRPO with outcome supervision."""
    num_groups = int(group_ids.max()) + 1
    count = torch.zeros(num_groups).index_add_(0, group_ids, torch.ones_like(scores)).clamp(min=1)
    mean = torch.zeros(num_groups).index_add_(0, group_ids, scores) / count
    centred = scores - mean[group_ids]
    variance = torch.zeros(num_groups).index_add_(0, group_ids, centred.square()) / count
    return centred / (variance.sqrt()[group_ids] + eps)


def token_rewards(
    scores: Tensor,  # [N]
    cu_seqlens: Tensor,  # [N + 1]
    loss_mask: Tensor,  # [T] bool
    *,
    kl_penalty: Tensor | None,  # [T], subtracted where trained
) -> Tensor:
    """The score on the last token of each sequence, minus the KL penalty on every trained token: [T]."""
    rewards = torch.zeros(loss_mask.numel())
    if kl_penalty is not None:
        rewards -= kl_penalty * loss_mask
    rewards[cu_seqlens[1:] - 1] += scores
    return rewards


def gae(
    rewards: Tensor,  # [T]
    values: Tensor,  # [T] value of the state in which token t was chosen
    cu_seqlens: Tensor,  # [N + 1]
    loss_mask: Tensor,  # [T] bool; the trained tokens of a sequence are contiguous up to masked gaps
    bootstrap: Tensor,  # [N] value of the state after the last token; 0 where the sequence ended by itself
    *,
    discount: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, [T] each, 0 outside loss_mask. Source: Schulman et al. 2016, eq. 16.

    delta_t = r_t + discount * V_{t+1} - V_t;  A_t = delta_t + discount * lambda * A_{t+1};  R_t = A_t + V_t.
    """
    lens = cu_seqlens[1:] - cu_seqlens[:-1]
    num_sequences, longest = lens.numel(), int(lens.max())
    # Right-aligned padding makes one reverse scan over rows of [longest, N] serve all sequences at once.
    real = torch.arange(longest)[None, :] >= (longest - lens)[:, None]
    padded_rewards, padded_values = torch.zeros(2, num_sequences, longest + 1)
    padded_rewards[:, :longest][real] = rewards
    padded_values[:, :longest][real] = values
    padded_values[:, longest] = bootstrap
    deltas = padded_rewards[:, :longest] + discount * padded_values[:, 1:] - padded_values[:, :longest]
    scan = deltas.t().contiguous()
    for t in range(longest - 2, -1, -1):
        scan[t].add_(scan[t + 1], alpha=discount * gae_lambda)
    advantages = scan.t()
    flat = advantages[real] * loss_mask
    return flat, (flat + values) * loss_mask


def whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Zero mean and unit variance over the masked entries, 0 elsewhere: same shape as x."""
    count = mask.sum().clamp(min=1)
    mean = (x * mask).sum() / count
    variance = ((x - mean).square() * mask).sum() / count
    return (x - mean) * torch.rsqrt(variance + eps) * mask


@dataclass
class ValueNorm:
    """Exponential moving mean and variance of the returns; the critic predicts the normalised return.

    Source: van Hasselt et al. 2016 (PopArt) without the rescaling of the output layer, as in AReaL's `value_norm`."""

    beta: float = 0.99995
    mean: float = 0.0
    mean_square: float = 0.0
    debias: float = 0.0

    def update(self, returns: Tensor, mask: Tensor) -> None:
        """Take in the masked entries of one batch of returns [T]."""
        x = returns[mask].double()
        if x.numel() == 0:
            return
        self.mean = self.beta * self.mean + (1 - self.beta) * float(x.mean())
        self.mean_square = self.beta * self.mean_square + (1 - self.beta) * float(x.square().mean())
        self.debias = self.beta * self.debias + (1 - self.beta)

    def _moments(self) -> tuple[float, float]:
        if self.debias == 0.0:
            return 0.0, 1.0
        mean = self.mean / self.debias
        return mean, max(self.mean_square / self.debias - mean**2, 1e-2) ** 0.5

    def normalize(self, x: Tensor) -> Tensor:
        mean, std = self._moments()
        return (x - mean) / std

    def denormalize(self, x: Tensor) -> Tensor:
        mean, std = self._moments()
        return x * std + mean
