"""From scores of answers and rewards of tokens to advantages: comparison with the other answers to the prompt,
generalised advantage estimation, normalisation, credit for single turns of a conversation.

Pure functions of scores [N] and group ids [N], and of packed tensors [T], in which `cu_seqlens` holds the boundaries of
sequences. A turn is a run of trained tokens; what a tool, a user or a template wrote parts two of them. K is the number
of turns of a batch, in the order of their tokens; all tokens of a turn have the same advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from core.algorithms.losses import turn_scores
from core.config.algorithm import AlgorithmSettings
from mcore_adapter.data.batch import sequence_of_token

if TYPE_CHECKING:
    from core.data.rollout_batch import RolloutBatch


_STD_EPS = 1e-6


def group_means(scores: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of the group of each sequence, and the number of sequences in it: [N] each."""
    num_groups = int(group_ids.max()) + 1
    count = torch.zeros(num_groups).index_add_(0, group_ids, torch.ones_like(scores)).clamp(min=1)
    mean = torch.zeros(num_groups).index_add_(0, group_ids, scores) / count
    return mean[group_ids], count[group_ids]


def centred(scores: Tensor, group_ids: Tensor, *, std: Literal["none", "group", "batch"] = "group") -> Tensor:
    """Divide (score - mean of its group) by (standard deviation + 1e-6), that of a sample (n - 1) of its group or of
    the batch, or by nothing; 0 in a group of one: [N].

    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2; std=none: Liu et al. 2025 (Dr. GRPO)."""
    means, counts = group_means(scores, group_ids)
    difference = scores - means
    if std == "none":
        return difference
    if std == "batch":
        return difference / (scores.std() + _STD_EPS) if scores.numel() > 1 else difference
    variance = group_means(difference.square(), group_ids)[0] * counts / (counts - 1).clamp(min=1)
    return difference / (variance.sqrt() + _STD_EPS)


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
    "gae": lambda scores, ids, s: centred(scores, ids) if s.compares_groups else scores,
    "returns": lambda scores, ids, s: scores,
    "group": lambda scores, ids, s: centred(scores, ids, std=s.advantage_std),
    "leave_one_out": lambda scores, ids, s: leave_one_out(scores, ids),
    "logavgexp": lambda scores, ids, s: log_average_exp(scores, ids, tau=s.opmd_tau),
    "maxrl": lambda scores, ids, s: maximum_likelihood(scores, ids),
}
"""By the value of algorithm.advantage."""


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


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The turns of a batch, with what each has earned."""

    of_token: Tensor  # [T] int64, -1 for tokens that are not trained
    sequence: Tensor  # [K] int64
    group: Tensor  # [K] int64: prompt that its sequence answers
    state: Tensor  # [K] int64: what it began in; -1: not known
    rewards: Tensor  # [K]: of the turn; the last one of a sequence also has the rest of the sequence's score

    @classmethod
    def of(cls, batch: RolloutBatch, scores: Tensor, settings: AlgorithmSettings) -> Turns:
        """Find the turns of a batch. `scores` [N]: of whole sequences, the rewards of their turns included."""
        mask, lens = torch.tensor(batch.loss_mask), torch.tensor(batch.cu_seqlens).diff()
        begins = mask & ~torch.cat((mask.new_zeros(1), mask[:-1]))  # the first token of a sequence is not trained
        sequence = sequence_of_token(lens)[begins]
        rewards = turn_scores(batch, sequence, settings).to(scores.dtype)
        last = torch.full((len(lens),), -1).scatter_reduce(0, sequence, torch.arange(len(sequence)), "amax")
        rest = scores - torch.zeros_like(scores).index_add(0, sequence, rewards)
        rewards = rewards.index_add(0, last[last >= 0], rest[last >= 0])
        states = torch.full_like(sequence, -1) if batch.turn_states is None else torch.tensor(batch.turn_states)
        return cls(
            of_token=torch.where(mask, begins.cumsum(0) - 1, -1),
            sequence=sequence,
            group=torch.tensor(batch.group_ids)[sequence],
            state=states,
            rewards=rewards,
        )

    def to_tokens(self, values: Tensor) -> Tensor:
        """Return the value [K] of its turn for each trained token, 0 for others: [T]."""
        return torch.cat((values, values.new_zeros(1)))[self.of_token]

    def returns(self, rewards: Tensor, *, discount: float) -> Tensor:
        """Compute G_k = sum over j >= k of discount^(j - k) * r_j within each sequence: [K]."""
        counts = torch.unique_consecutive(self.sequence, return_counts=True)[1]
        everything = torch.ones_like(rewards, dtype=torch.bool)
        found, _ = gae(
            rewards, torch.zeros_like(rewards), _ends(counts), everything, rewards.new_zeros(len(counts)),
            discount=discount, gae_lambda=1.0,
        )  # fmt: skip
        return found


def turn_advantages(turns: Turns, settings: AlgorithmSettings) -> Tensor:
    """Return what algorithm.credit adds to the advantages of turns: [K].

    turn_rewards: A_k = sum over j >= k of (r_j - mean(r)) / (std(r) + 1e-6), mean and std over all turns of the group
    (algorithm.advantage_std). Source: Shao et al. 2024 (DeepSeekMath), section 4.1.3, process supervision, with turns
    as the steps. Otherwise turn_weight * step_advantages()."""
    if settings.credits_turn_rewards:
        return turns.returns(centred(turns.rewards, turns.group, std=settings.advantage_std), discount=1.0)
    return settings.turn_weight * step_advantages(turns, settings)


def step_advantages(turns: Turns, settings: AlgorithmSettings) -> Tensor:
    """Compare the return of a turn with those of the turns of its group that began in the same state; 0 for a turn
    without another one: [K].

    A_k = (G_k - mean(G)) / (std(G) + 1e-6), G_k = sum over j >= k of gamma^(j - k) * r_j, gamma = turn_discount.
    Source: Feng et al. 2025 (GiGPO), eq. 5 to 7; algorithm.advantage_std=none is its F_norm = 1."""
    returns = turns.returns(turns.rewards, discount=settings.turn_discount)
    own = -1 - torch.arange(len(returns))  # a turn whose state is not known is compared with no other
    keys = torch.stack((turns.group, torch.where(turns.state < 0, own, turns.state)))
    ids = torch.unique(keys, dim=1, return_inverse=True)[1]
    std = "group" if settings.advantage_std == "batch" else settings.advantage_std
    return centred(returns, ids, std=std)


def share_compared(turns: Turns) -> float:
    """Return the share of turns that began in the state of another turn of their group."""
    keys = torch.stack((turns.group, turns.state))
    _, ids, counts = torch.unique(keys, dim=1, return_inverse=True, return_counts=True)
    return float(((counts[ids] > 1) & (turns.state >= 0)).double().mean())


def turn_gae(
    turns: Turns,
    token_rewards: Tensor,  # [T], of single tokens beside those of turns, 0 where not trained
    values: Tensor,  # [T]
    bootstrap: Tensor,  # [N] value of the state after the last turn; 0 where the sequence ended by itself
    *,
    discount: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns of tokens, [T] each, with turns as the time steps.

    delta_k = r_k + discount * V_{k+1} - V_k;  A_k = delta_k + discount * lambda * A_{k+1};  R_k = A_k + V_k,
    with V_k the value of the first token of turn k. Every token of a turn has A_k, and R_k as the critic's target.
    Source: Schulman et al. 2016, eq. 16; turns as steps: Zhou et al. 2024 (ArCHer), section 3."""
    trained = turns.of_token >= 0
    first = torch.full_like(turns.sequence, len(turns.of_token))
    first = first.scatter_reduce(0, turns.of_token[trained], trained.nonzero().squeeze(1), "amin")
    rewards = turns.rewards.index_add(0, turns.of_token[trained], token_rewards[trained])
    counts = torch.bincount(turns.sequence, minlength=len(bootstrap))
    kept = counts > 0
    everything = torch.ones_like(rewards, dtype=torch.bool)
    advantages, returns = gae(
        rewards, values[first], _ends(counts[kept]), everything, bootstrap[kept],
        discount=discount, gae_lambda=gae_lambda,
    )  # fmt: skip
    return turns.to_tokens(advantages), turns.to_tokens(returns)


def _ends(counts: Tensor) -> Tensor:
    return torch.cat((counts.new_zeros(1), counts.cumsum(0)))
