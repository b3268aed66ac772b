"""From rewards of tokens to advantages: generalised advantage estimation and normalisation. Pure functions on packed
tensors; `cu_seqlens` holds the boundaries of sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_adapter.data.batch import sequence_of_token


def last_trained(cu_seqlens: Tensor, loss_mask: Tensor) -> Tensor:
    """Find the place in [0, T) of the last trained token of each sequence, its first token where none is trained:
    [N]."""
    lens = cu_seqlens[1:] - cu_seqlens[:-1]
    sequence = sequence_of_token(lens)
    return cu_seqlens[:-1].scatter_reduce(0, sequence[loss_mask], loss_mask.nonzero().squeeze(1), "amax")


def gae(
    rewards: Tensor,  # [T]
    values: Tensor,  # [T] value of the state in which token t was chosen
    cu_seqlens: Tensor,  # [N + 1]
    loss_mask: Tensor,  # [T] bool
    bootstrap: Tensor,  # [N] value of the state after the last trained token; 0 where the sequence ended by itself
    *,
    discount: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns, [T] each, 0 outside loss_mask. Source: Schulman et al. 2016, eq. 16.

    delta_t = r_t + discount * V_{t+1} - V_t;  A_t = delta_t + discount * lambda * A_{t+1};  R_t = A_t + V_t.

    t counts trained tokens only: tokens in between that are not trained (what a tool or a user wrote) are no steps of
    the policy, so neither discount nor lambda acts over them. The reward of such a token, the last one of a sequence
    included, belongs to the last trained token before it; without one there is no token to credit, and it is dropped.
    """
    lens = cu_seqlens[1:] - cu_seqlens[:-1]
    sequence = sequence_of_token(lens)
    counts = torch.zeros_like(lens).index_add_(0, sequence, loss_mask.to(lens.dtype))
    earned_by = loss_mask.cumsum(0) - 1  # number of the last trained token, counted over the whole batch
    earned = earned_by >= (counts.cumsum(0) - counts)[sequence]
    own_rewards = rewards.new_zeros(int(counts.sum())).index_add_(0, earned_by[earned], rewards[earned])
    scanned = _scan(own_rewards, values[loss_mask], counts, bootstrap, discount=discount, gae_lambda=gae_lambda)
    advantages = torch.zeros_like(rewards)
    advantages[loss_mask] = scanned
    return advantages, (advantages + values) * loss_mask


def _scan(
    rewards: Tensor, values: Tensor, lens: Tensor, bootstrap: Tensor, *, discount: float, gae_lambda: float
) -> Tensor:
    """Compute the advantages of sequences of `lens` tokens [N] laid end to end, all of them trained: [sum of lens]."""
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
    return scan.t()[real]


def whiten(x: Tensor, mask: Tensor, *, of_sample: bool = False) -> Tensor:
    """Normalize to zero mean and unit variance over the masked entries, 0 elsewhere: same shape as x.

    The variance is that of the population, plus 1e-5, or that of a sample (divided by n - 1), plus 1e-8."""
    count = mask.sum().clamp(min=1)
    mean = (x * mask).sum() / count
    squares = ((x - mean).square() * mask).sum()
    variance = squares / (count - 1).clamp(min=1) + 1e-8 if of_sample else squares / count + 1e-5
    return (x - mean) * torch.rsqrt(variance) * mask


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
