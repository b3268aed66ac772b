"""Credit for single turns of a conversation: rewards that a workflow gave to them, estimation over turns as time steps,
comparison of turns that began in the same state.

A turn is a run of trained tokens; what a tool, a user or a template wrote parts two of them. K is the number of turns
of a batch, in the order of their tokens; all tokens of a turn have the same advantage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.algorithms.advantages import centred, gae
from mcore_adapter.data.batch import sequence_of_token

if TYPE_CHECKING:
    from core.config.algorithm import AlgorithmSettings
    from core.data.rollout_batch import RolloutBatch


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
        rewards = torch.zeros(len(sequence), dtype=scores.dtype)
        if batch.turn_rewards is not None:
            rewards += torch.tensor(batch.turn_rewards) * settings.reward_output_scaling
            if settings.mask_no_eos_with_zero:
                rewards[torch.tensor(batch.no_eos)[sequence]] = 0.0
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
    """Return what algorithm.credit adds to the advantages of turns: [K]."""
    if settings.credit == "turn_rewards":
        return process_advantages(turns, settings)
    return settings.turn_weight * step_advantages(turns, settings)


def process_advantages(turns: Turns, settings: AlgorithmSettings) -> Tensor:
    """Sum the rewards from a turn on, each of them minus the mean of all turns of the group and divided by their
    standard deviation (algorithm.advantage_std): [K].

    A_k = sum over j >= k of (r_j - mean(r)) / (std(r) + 1e-6).
    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.3, process supervision, with turns as the steps."""
    return turns.returns(centred(turns.rewards, turns.group, std=settings.advantage_std), discount=1.0)


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
