"""PPO with a critic, or without one; with group_adv_norm and without a critic it is GRPO. Source: Schulman et al. 2017.

This is the algorithm of configurations without algorithm.name. Its minibatches deal single sequences: their
advantages are fixed before, so that a group may be split, and training curves of such configurations stay as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as names_of
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.algorithms.advantages import (
    ValueNorm,
    gae,
    group_normalize,
    last_trained,
    reward_metrics,
    sequence_scores,
    token_kl_penalty,
    token_rewards,
    whiten,
)
from core.algorithms.base import Algorithm, Metrics, Objective, Pass, Unit
from core.algorithms.losses import ppo_loss, value_loss
from core.algorithms.settings import AlgorithmSettings, read_options

if TYPE_CHECKING:
    from core.data.rollout_batch import RolloutBatch
    from mcore_adapter.data.sequences import Sequences
    from mcore_adapter.forward import ModelOutput


@dataclass(frozen=True)
class PPOConfig:
    """algorithm.options of PPO: none; its settings are ppo.* and algorithm.*."""


class ConfiguredAlgorithm(Algorithm):
    """An algorithm whose passes and entropy term follow from AlgorithmSettings."""

    _settings: AlgorithmSettings

    @property
    def passes(self) -> frozenset[Pass]:
        settings = self._settings
        wanted: dict[Pass, bool] = {
            "old_logprobs": settings.needs_old_logprobs,
            "ref_logprobs": settings.needs_reference,
            "values": not settings.disable_value,
        }
        return frozenset(name for name, needed in wanted.items() if needed)

    @property
    def needs_entropy(self) -> bool:
        return self._settings.entropy_coeff != 0.0


class PPO(ConfiguredAlgorithm):
    """Clipped policy updates on advantages of generalised advantage estimation."""

    unit: Unit = "sequence"
    reads = frozenset(field.name for field in names_of(AlgorithmSettings))

    def __init__(self, settings: AlgorithmSettings, options: Mapping[str, Any]) -> None:
        """Raises ValueError for options that do not exist."""
        read_options(PPOConfig, options)
        self._settings = settings
        self._value_norm = ValueNorm()

    @property
    def critic(self) -> Objective | None:
        return None if self._settings.disable_value else Critic(value_eps_clip=self._settings.value_eps_clip)

    def advantages(
        self, batch: RolloutBatch, fields: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        settings, mask = self._settings, fields["loss_mask"]
        cu_seqlens, no_eos = torch.tensor(batch.cu_seqlens), torch.tensor(batch.no_eos)
        trained_on = policy_fields(settings, fields)
        scores = sequence_scores(batch, settings)
        task_reward = scores.mean()
        if settings.group_adv_norm:
            scores = group_normalize(scores, torch.tensor(batch.group_ids))
        kl_penalty = token_kl_penalty({**fields, **trained_on}, settings)
        rewards = token_rewards(scores, cu_seqlens, mask, kl_penalty=kl_penalty)
        values = fields.get("old_values", torch.zeros_like(rewards))
        if settings.value_norm:
            values = self._value_norm.denormalize(values) * mask
        bootstrap = torch.where(no_eos, values[last_trained(cu_seqlens, mask)], 0.0)
        advantages, returns = gae(
            rewards, values, cu_seqlens, mask, bootstrap, discount=settings.discount, gae_lambda=settings.gae_lambda
        )
        if not settings.disable_value:
            trained_on["returns"] = self._normalised(returns, mask)
        metrics = reward_metrics(task_reward, kl_penalty, advantages, mask, batch.num_sequences, settings)
        trained_on["advantages"] = whiten(advantages, mask) if settings.adv_norm else advantages
        return trained_on, metrics

    def _normalised(self, returns: Tensor, mask: Tensor) -> Tensor:
        if not self._settings.value_norm:
            return returns
        self._value_norm.update(returns, mask)
        return self._value_norm.normalize(returns) * mask

    def loss(self, output: ModelOutput, fields: Mapping[str, Tensor], sequences: Sequences) -> tuple[Tensor, Metrics]:
        return clipped_loss(self._settings, output, fields)

    def state_dict(self) -> dict[str, object]:
        return {"value_norm": asdict(self._value_norm)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "value_norm" in state:
            self._value_norm = replace(self._value_norm, **state["value_norm"])


@dataclass(frozen=True, kw_only=True)
class Critic(Objective):
    """The clipped squared error of the critic."""

    value_eps_clip: float

    def loss(self, output: ModelOutput, fields: Mapping[str, Tensor], sequences: Sequences) -> tuple[Tensor, Metrics]:
        return value_loss(output, fields, value_eps_clip=self.value_eps_clip)


def policy_fields(settings: AlgorithmSettings, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the field of the policy in the denominator of the clipped ratio: the generators', unless the objective is
    decoupled."""
    return {} if settings.decoupled else {"old_logprobs": fields["rollout_logprobs"]}


def clipped_loss(
    settings: AlgorithmSettings, output: ModelOutput, fields: Mapping[str, Tensor]
) -> tuple[Tensor, Metrics]:
    """Compute the clipped surrogate with the KL and entropy terms of these settings."""
    return ppo_loss(
        output,
        fields,
        eps_clip=settings.eps_clip,
        behave_imp_weight_cap=settings.behave_imp_weight_cap if settings.decoupled else None,
        kl_coeff=settings.kl_coeff,
        kl_estimator=settings.kl_estimator,
        entropy_coeff=settings.entropy_coeff,
    )
