"""From scores to advantages: reward shaping, generalised advantage estimation, normalisation. Pure functions on
packed tensors; `cu_seqlens` holds the boundaries of sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.algorithms.losses import kl_estimate

if TYPE_CHECKING:
    from core.algorithms.settings import AlgorithmSettings
    from core.data.rollout_batch import RolloutBatch


def shape_scores(
    scores: Tensor,  # [N] scores of the reward function
    no_eos: Tensor,  # [N] bool, completions cut off by the length limit
    *,
    bias: float,
    scaling: float,
    mask_no_eos_with_zero: bool,
) -> Tensor:
    """Compute (score - bias) * scaling, 0 for truncated completions when `mask_no_eos_with_zero`: [N]."""
    shaped = (scores - bias) * scaling
    return torch.where(no_eos, torch.zeros_like(shaped), shaped) if mask_no_eos_with_zero else shaped


def sequence_scores(batch: RolloutBatch, settings: AlgorithmSettings) -> Tensor:
    """Return the shaped reward of each sequence: [N]."""
    return shape_scores(
        torch.tensor(batch.rewards), torch.tensor(batch.no_eos),
        bias=settings.reward_output_bias, scaling=settings.reward_output_scaling,
        mask_no_eos_with_zero=settings.mask_no_eos_with_zero,
    )  # fmt: skip


def token_kl_penalty(fields: Mapping[str, Tensor], settings: AlgorithmSettings) -> Tensor | None:
    """Compute kl_ctl * KL of each token, which is subtracted from rewards, [T]; None where the KL divergence is not
    part of the reward."""
    if not settings.kl_in_reward:
        return None
    return settings.kl_ctl * kl_estimate(fields["old_logprobs"], fields["ref_logprobs"], settings.kl_estimator)


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


def sequence_advantages(
    batch: RolloutBatch,
    fields: Mapping[str, Tensor],
    settings: AlgorithmSettings,
    *,
    baseline: Callable[[Tensor, Tensor], Tensor],
    normalize: bool,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Compute fields and metrics of an algorithm without a critic whose sequences have one advantage, on every trained
    token.

    `baseline(scores [N], group_ids [N])` gives the advantages [N]. With kl_in=reward a score is the reward minus the
    KL penalties of the sequence's trained tokens. `normalize`: whiten over the trained tokens of the batch."""
    mask, lens = fields["loss_mask"], torch.tensor(batch.cu_seqlens).diff()
    sequence = torch.arange(batch.num_sequences).repeat_interleave(lens)
    trained_on = {} if settings.decoupled else {"old_logprobs": fields["rollout_logprobs"]}
    scores = sequence_scores(batch, settings)
    task_reward = scores.mean()
    kl_penalty = token_kl_penalty({**fields, **trained_on}, settings)
    if kl_penalty is not None:
        scores = scores.index_add(0, sequence, -kl_penalty * mask)
    advantages = baseline(scores, torch.tensor(batch.group_ids))[sequence] * mask
    metrics = reward_metrics(task_reward, kl_penalty, advantages, mask, batch.num_sequences, settings)
    trained_on["advantages"] = whiten(advantages, mask) if normalize else advantages
    return trained_on, metrics


def group_normalize(scores: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Compute (score - mean of its group) / (standard deviation of its group + eps): [N]. Source: Shao et al. 2024
    (DeepSeekMath), section 4.1.2, GRPO with outcome supervision."""
    num_groups = int(group_ids.max()) + 1
    count = torch.zeros(num_groups).index_add_(0, group_ids, torch.ones_like(scores)).clamp(min=1)
    mean = torch.zeros(num_groups).index_add_(0, group_ids, scores) / count
    centred = scores - mean[group_ids]
    variance = torch.zeros(num_groups).index_add_(0, group_ids, centred.square()) / count
    return centred / (variance.sqrt()[group_ids] + eps)


def group_means(scores: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of the group of each sequence, and the number of sequences in it: [N] each."""
    num_groups = int(group_ids.max()) + 1
    count = torch.zeros(num_groups).index_add_(0, group_ids, torch.ones_like(scores)).clamp(min=1)
    mean = torch.zeros(num_groups).index_add_(0, group_ids, scores) / count
    return mean[group_ids], count[group_ids]


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


def last_trained(cu_seqlens: Tensor, loss_mask: Tensor) -> Tensor:
    """Place in [0, T) of the last trained token of each sequence; its first token where none is trained: [N]."""
    lens = cu_seqlens[1:] - cu_seqlens[:-1]
    sequence = torch.arange(lens.numel()).repeat_interleave(lens)
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
    sequence = torch.arange(lens.numel()).repeat_interleave(lens)
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


def whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Normalize to zero mean and unit variance over the masked entries, 0 elsewhere: same shape as x."""
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
