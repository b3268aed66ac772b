"""Hand-made batches for the tests of algorithms: groups of answers, one reward each."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.algorithms.losses import policy_loss
from core.algorithms.policy_gradient import PolicyGradient
from core.config.algorithm import AlgorithmSettings
from core.config.presets import PRESETS
from core.data.rollout_batch import RolloutBatch, pack_trajectories
from mcore_adapter.data.batch import Sequences
from rollout.types import PROMPT_VERSION, Trajectory

PLAIN = AlgorithmSettings()


def settings(**changes: Any) -> AlgorithmSettings:
    """PLAIN with these changes."""
    return PLAIN.model_copy(update=changes)


def algorithm(name: str | None, **changes: Any) -> PolicyGradient:
    """The preset `name` without KL divergence and correction, and with these changes of settings."""
    known = AlgorithmSettings.model_fields.keys()
    preset = {key.rpartition(".")[2]: value for key, value in PRESETS[name].values.items()} if name else {}
    plain = {"kl_ctl": 0.0, "correction": "bypass", "disable_value": name not in (None, "ppo")}
    values = {**preset, **plain, **changes}
    assert values.keys() <= known
    return PolicyGradient(settings(**values), {})


def ppo_loss(output: Any, fields: dict[str, Tensor], **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The decoupled clipped loss of one sequence with these settings."""
    count = fields["loss_mask"].numel()
    one = Sequences(of_token=torch.zeros(count, dtype=torch.int64), count=1)
    return policy_loss(output, fields, one, settings(**{"correction": "decoupled", "kl_in": "loss", **changes}))


def ppo_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor,
    **changes: Any,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """ppo_loss() of these tensors."""
    fields = {
        "old_logprobs": old_logprobs, "rollout_logprobs": rollout_logprobs, "advantages": advantages,
        "loss_mask": loss_mask,
    }  # fmt: skip
    return ppo_loss(SimpleNamespace(logprobs=logprobs, entropy=None), fields, **changes)


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
    batch = pack_trajectories(groups, [f"q{i}" for i in range(len(groups))])
    packed = batch.to_packed()
    return batch, {**packed.fields, "loss_mask": packed.loss_mask}


def by_answer(batch: RolloutBatch, values: Tensor) -> list[list[float]]:
    """[T] -> the values of the trained tokens of each answer."""
    mask = torch.tensor(batch.loss_mask)
    parts = zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)
    return [values[a:b][mask[a:b]].tolist() for a, b in parts]
