"""Hand-made batches for the tests of algorithms: groups of answers, one reward each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.algorithms.settings import AlgorithmSettings
from core.data.rollout_batch import RolloutBatch, pack_trajectories
from rollout.types import PROMPT_VERSION, Trajectory

PLAIN = AlgorithmSettings(
    ppo_n_minibatches=1, kl_ctl=0.0, kl_in="reward", kl_estimator="k1", discount=1.0, gae_lambda=1.0, eps_clip=0.2,
    value_eps_clip=0.2, disable_value=False, reward_output_scaling=1.0, reward_output_bias=0.0, adv_norm=False,
    value_norm=False, group_adv_norm=False, mask_no_eos_with_zero=False, decoupled=False, behave_imp_weight_cap=None,
    entropy_coeff=0.0,
)  # fmt: skip


def settings(**changes: Any) -> AlgorithmSettings:
    """PLAIN with these changes."""
    return replace(PLAIN, **changes)


def answer(reward: float, num_tokens: int = 2) -> Trajectory:
    """A prompt of one token and an answer of `num_tokens`, sampled with log-probability -1 each."""
    n = num_tokens + 1
    return Trajectory(
        query_id="q",
        token_ids=np.arange(n, dtype=np.int32),
        loss_mask=np.arange(n) > 0,
        rollout_logprobs=np.where(np.arange(n) > 0, -1.0, 0.0).astype(np.float32),
        versions=np.array([PROMPT_VERSION] + [0] * num_tokens, np.int32),
        reward=reward,
        finish_reason="stop",
    )


def batch_of(*rewards: Sequence[float], lens: Sequence[int] | None = None) -> tuple[RolloutBatch, dict[str, Tensor]]:
    """Groups of answers with these rewards, and the fields that the loop starts from. `lens`: of all answers."""
    numbers = iter(lens or [2] * sum(map(len, rewards)))
    groups = [[answer(reward, next(numbers)) for reward in group] for group in rewards]
    batch = pack_trajectories(groups, positions=list(range(len(groups))))
    packed = batch.to_packed()
    return batch, {**packed.fields, "loss_mask": packed.loss_mask}


def by_answer(batch: RolloutBatch, values: Tensor) -> list[list[float]]:
    """[T] -> the values of the trained tokens of each answer."""
    mask = torch.tensor(batch.loss_mask)
    parts = zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)
    return [values[a:b][mask[a:b]].tolist() for a, b in parts]
