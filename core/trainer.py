"""The loop: take a batch, score it, advantages, minibatch updates, push weights, report, save.

Everything it drives (trainer ranks, generators, the rollout side, the monitor) is handed in; it knows the algorithm and
nothing about processes. Invariant: step i (from 0) trains at version i and ends with version i + 1 everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from core.algorithms.advantages import ValueNorm, gae, group_normalize, shape_scores, token_rewards, whiten
from core.algorithms.losses import KLEstimator, kl_estimate, ppo_loss, value_loss
from core.data.rollout_batch import RolloutBatch
from core.monitoring.monitor import Monitor, StepTimer
from core.recovery.memory import MemoryLimits
from core.recovery.recover import RunState
from core.schedule import Schedule

if TYPE_CHECKING:
    from core.config.experiments import PPOMATHConfig
    from core.launch.rollout_client import RolloutClient
    from core.launch.trainer_group import TrainerGroup
    from core.periodic import PeriodicActions
    from core.weight_sync.base import RunPush
    from mcore_adapter.data.batch import PackedBatch
    from mcore_adapter.engine import LossFn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    """What the update computes; the names are the configuration's."""

    ppo_n_minibatches: int
    kl_ctl: float
    kl_in: Literal["reward", "loss"]
    kl_estimator: KLEstimator
    discount: float
    gae_lambda: float
    eps_clip: float
    value_eps_clip: float
    disable_value: bool
    reward_output_scaling: float
    reward_output_bias: float
    adv_norm: bool
    value_norm: bool
    group_adv_norm: bool
    mask_no_eos_with_zero: bool
    decoupled: bool
    behave_imp_weight_cap: float | None
    entropy_coeff: float
    temperature: float

    @property
    def needs_reference(self) -> bool:
        return self.kl_ctl != 0.0

    @property
    def needs_old_logprobs(self) -> bool:
        """With one minibatch the proximal policy is the current one: the update's own forward pass gives it. Without
        the decoupled objective the ratio is taken against the behaviour policy, which the generators have told."""
        kl_in_reward = self.needs_reference and self.kl_in == "reward"
        return self.decoupled and (kl_in_reward or self.ppo_n_minibatches > 1)


@dataclass(frozen=True, kw_only=True)
class EngineRef:
    """An engine by name in the group of ranks that holds it, with its token limits a microbatch."""

    group: TrainerGroup
    name: str
    train_role: str
    inference_role: str
    train_tokens_per_mb: int
    inference_tokens_per_mb: int

    def train_step(
        self, batch: Any, sequences: Sequence[int], loss: LossFn, memory: MemoryLimits, **kwargs: Any
    ) -> dict[str, float]:
        """One update on these sequences of a batch in the store, in microbatches that fit."""
        return memory.fitting(
            self.train_role, self.train_tokens_per_mb,
            lambda limit: self.group.train_step(
                self.name, batch, sequences, loss, max_tokens_per_mb=limit,
                max_sequence_tokens=self.train_tokens_per_mb, **kwargs,
            ),
        )  # fmt: skip

    def per_token(self, method: str, batch: PackedBatch, handle: Any, memory: MemoryLimits, **kwargs: Any) -> Tensor:
        """ "logprobs" or "values" of every token of the batch, in microbatches that fit: [T] float32."""
        return memory.fitting(
            self.inference_role, self.inference_tokens_per_mb,
            lambda limit: self.group.per_token(
                method, self.name, batch, handle, max_tokens_per_mb=limit,
                max_sequence_tokens=self.inference_tokens_per_mb, **kwargs,
            ),
        )  # fmt: skip


class PPOTrainer:
    """PPO with a critic, or without (`disable_value`: group-normalised advantages)."""

    def __init__(
        self,
        *,
        actor: EngineRef,
        critic: EngineRef | None,
        reference: EngineRef | None,
        rollout: RolloutClient,
        weights: RunPush,
        memory: MemoryLimits,
        settings: AlgorithmSettings,
        schedule: Schedule,
        monitor: Monitor,
        timer: StepTimer,
        mean_batch_tokens: float,
    ) -> None:
        self._actor, self._critic, self._reference = actor, critic, reference
        self._rollout, self._weights, self._memory = rollout, weights, memory
        self._settings, self._schedule, self._monitor = settings, schedule, monitor
        self._mean_batch_tokens = mean_batch_tokens
        self._value_norm = ValueNorm()
        self._timer = timer

    def run(self, start: RunState, periodic: PeriodicActions) -> None:
        """Train from `start` to the end of the schedule; periodic saves and evaluates when due."""
        if start.extra:
            self._value_norm = ValueNorm(**start.extra["value_norm"])  # type: ignore[arg-type]
        for step in range(start.step, self._schedule.total_steps):
            with self._timer("wait for rollout"):
                rollout, figures = self._rollout.take(step, meanwhile=self._weights.sync_rejoined)
            with self._timer("offload generators"):
                self._weights.offload_generators()
            routing_replay = rollout.routing_replay()
            batch, metrics = self._score(rollout, routing_replay)
            metrics |= self._update(batch, routing_replay, step)
            with self._timer("push"):
                pushed = self._weights.push(step + 1)
                self._rollout.set_version(step + 1)
            periodic.after_step(step + 1, self._timer)
            figures |= pushed.metrics()
            self._report(step, rollout, metrics, figures)
            periodic.after_report(step + 1, self._timer)

    @property
    def state(self) -> dict[str, object]:
        """What of this object a recover checkpoint must hold."""
        return {"value_norm": asdict(self._value_norm), "memory": self._memory.state_dict()}

    def _score(
        self, rollout: RolloutBatch, routing_replay: Mapping[str, Tensor]
    ) -> tuple[PackedBatch, dict[str, float]]:
        """Log-probabilities of the other policies, values, rewards and advantages of a batch."""
        settings = self._settings
        batch = rollout.to_packed()
        fields: dict[str, Tensor] = {}
        others_pass = self._reference is not None or self._critic is not None
        handle = None
        if others_pass or (settings.needs_old_logprobs and not routing_replay):
            handle = self._actor.group.put(batch)
        if settings.needs_old_logprobs:
            with self._timer("old log-probs"):
                own = batch.with_fields(**routing_replay)
                own_handle = self._actor.group.put(own) if routing_replay else handle
                fields["old_logprobs"] = self._logprobs(self._actor, own, own_handle)
        if not settings.decoupled:
            fields["old_logprobs"] = batch.fields["rollout_logprobs"]
        if self._reference is not None:
            with self._timer("ref log-probs"):
                fields["ref_logprobs"] = self._logprobs(self._reference, batch, handle)
        if self._critic is not None:
            with self._timer("values"):
                fields["old_values"] = self._critic.per_token("values", batch, handle, self._memory)
        with self._timer("advantages"):
            computed, metrics = self._advantages(rollout, batch, fields)
        return batch.with_fields(**fields, **computed), metrics

    def _logprobs(self, engine: EngineRef, batch: PackedBatch, handle: Any) -> Tensor:
        return engine.per_token("logprobs", batch, handle, self._memory, temperature=self._settings.temperature)

    def _advantages(
        self, rollout: RolloutBatch, batch: PackedBatch, fields: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Advantages (and returns, for the critic) of every trained token, and the tutorial's reward metrics."""
        settings, mask = self._settings, batch.loss_mask
        no_eos = torch.tensor(rollout.no_eos)
        scores = shape_scores(
            torch.tensor(rollout.rewards), no_eos,
            bias=settings.reward_output_bias, scaling=settings.reward_output_scaling,
            mask_no_eos_with_zero=settings.mask_no_eos_with_zero,
        )  # fmt: skip
        task_reward = scores.mean()
        if settings.group_adv_norm:
            scores = group_normalize(scores, torch.tensor(rollout.group_ids))
        kl_penalty = None
        if settings.needs_reference and settings.kl_in == "reward":
            kl = kl_estimate(fields["old_logprobs"], fields["ref_logprobs"], settings.kl_estimator)
            kl_penalty = settings.kl_ctl * kl
        rewards = token_rewards(scores, batch.cu_seqlens, mask, kl_penalty=kl_penalty)
        values = fields.get("old_values", torch.zeros_like(rewards))
        if settings.value_norm:
            values = self._value_norm.denormalize(values) * mask
        last = batch.cu_seqlens[1:] - 1
        advantages, returns = gae(
            rewards, values, batch.cu_seqlens, mask, torch.where(no_eos, values[last], 0.0),
            discount=settings.discount, gae_lambda=settings.gae_lambda,
        )  # fmt: skip
        computed: dict[str, Tensor] = {}
        if self._critic is not None:
            if settings.value_norm:
                self._value_norm.update(returns, mask)
                returns = self._value_norm.normalize(returns) * mask
            computed["returns"] = returns
        trained = mask.sum().clamp(min=1)
        kl_reward = -(kl_penalty * mask).sum() / rollout.num_sequences if kl_penalty is not None else torch.zeros(())
        metrics = {
            "task_reward": float(task_reward),
            "kl_reward": float(kl_reward),
            "final_reward": float(task_reward + kl_reward),
            "advantage": float(advantages.sum() / trained),
            "avg_seq_len": float(batch.seq_lens.float().mean()),
            "avg_prompt_len": float(rollout.prompt_lens.mean()),
            "n_tokens": float((rollout.versions >= 0).sum()),
            "n_valid_tokens": float(mask.sum()),
            "n_seqs": float(rollout.num_sequences),
            "no_eos_ratio": float(rollout.no_eos.mean()),
            "disable_value": float(settings.disable_value),
            "mask_no_eos_with_zero": float(settings.mask_no_eos_with_zero),
        }
        computed["advantages"] = whiten(advantages, mask) if settings.adv_norm else advantages
        return computed, metrics

    def _update(self, batch: PackedBatch, routing_replay: Mapping[str, Tensor], step: int) -> dict[str, float]:
        """Run one pass over the batch in minibatches: critic first, as the actor's advantages are already fixed.
        `routing_replay` is for the actor alone: other models have experts of their own."""
        settings = self._settings
        minibatches = split_minibatches(batch.num_sequences, settings.ppo_n_minibatches, seed=step)
        metrics: dict[str, float] = {}
        if self._critic is not None:
            with self._timer("critic update"):
                loss = partial(value_loss, value_eps_clip=settings.value_eps_clip)
                metrics |= self._train(self._critic, batch, minibatches, loss, prefix="critic_")
        with self._timer("update"):
            loss = partial(
                ppo_loss,
                eps_clip=settings.eps_clip,
                behave_imp_weight_cap=settings.behave_imp_weight_cap if settings.decoupled else None,
                kl_coeff=settings.kl_ctl if settings.kl_in == "loss" else 0.0,
                kl_estimator=settings.kl_estimator,
                entropy_coeff=settings.entropy_coeff,
            )
            metrics |= self._train(
                self._actor, batch.with_fields(**routing_replay), minibatches, loss, prefix="",
                temperature=settings.temperature, with_entropy=settings.entropy_coeff != 0.0,
            )  # fmt: skip
        return metrics

    def _train(
        self,
        engine: EngineRef,
        batch: PackedBatch,
        minibatches: list[list[int]],
        loss: Any,
        *,
        prefix: str,
        **kwargs: Any,
    ) -> dict[str, float]:
        """Metrics averaged over the minibatches; `loss`, `grad_norm`, `lr` ... get the prefix."""
        handle = engine.group.put(batch)
        every = [engine.train_step(handle, sequences, loss, self._memory, **kwargs) for sequences in minibatches]
        return {prefix + k: float(np.mean([m[k] for m in every])) for k in every[0]}

    def _report(
        self, step: int, rollout: RolloutBatch, metrics: dict[str, float], figures: Mapping[str, float]
    ) -> None:
        # The order of the tutorial's line: what the loss says, then what the rewards say, then what is ours.
        first = ("ppo_approx_kl", "actor_loss", "actor_clip_ratio", "importance_weight")
        rewards = (
            "task_reward", "kl_reward", "final_reward", "advantage", "avg_seq_len", "avg_prompt_len", "n_tokens",
            "n_valid_tokens", "n_seqs", "no_eos_ratio", "disable_value", "mask_no_eos_with_zero",
        )  # fmt: skip
        ordered = {k: metrics[k] for k in first + rewards}
        ordered |= {k: v for k, v in metrics.items() if k not in ordered}
        self._monitor.rpc("actor_train", ordered)
        ages = rollout.ages(step)
        self._monitor.staleness(ages)
        self._monitor.consumed(step + 1, rollout.positions)
        seconds, phases = self._timer.finish()
        epoch, epoch_step = self._schedule.position(step + 1)
        ages_metrics = {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}
        self._monitor.step(
            step=step + 1, epoch=epoch, total_epochs=self._schedule.total_epochs, epoch_step=epoch_step,
            steps_per_epoch=self._schedule.steps_per_epoch, mean_batch_tokens=self._mean_batch_tokens,
            seconds=seconds, phases=phases, metrics={**ordered, **figures, **ages_metrics},
            headline=f"task_reward {metrics['task_reward']:.3f}",
        )  # fmt: skip


def split_minibatches(num_sequences: int, count: int, *, seed: int) -> list[list[int]]:
    """Sequences dealt at random into `count` minibatches whose sizes differ by at most one; none is empty."""
    order = np.random.default_rng(seed).permutation(num_sequences)
    return [sorted(map(int, part)) for part in np.array_split(order, min(count, num_sequences))]


def settings_from_config(config: PPOMATHConfig) -> AlgorithmSettings:
    """The algorithm's part of the configuration, derived values filled in."""
    ppo, algorithm = config.ppo, config.algorithm
    return AlgorithmSettings(
        ppo_n_minibatches=ppo.ppo_n_minibatches,
        kl_ctl=ppo.kl_ctl,
        kl_in=algorithm.kl_in,
        kl_estimator=config.kl_estimator,
        discount=ppo.discount,
        gae_lambda=ppo.gae_lambda,
        eps_clip=ppo.eps_clip,
        value_eps_clip=ppo.value_eps_clip,
        disable_value=ppo.disable_value,
        reward_output_scaling=ppo.reward_output_scaling,
        reward_output_bias=ppo.reward_output_bias,
        adv_norm=ppo.adv_norm,
        value_norm=ppo.value_norm and not ppo.disable_value,
        group_adv_norm=config.group_adv_norm,
        mask_no_eos_with_zero=ppo.mask_no_eos_with_zero,
        decoupled=config.decoupled,
        behave_imp_weight_cap=algorithm.behave_imp_weight_cap,
        entropy_coeff=algorithm.entropy_coeff,
        temperature=ppo.gen.temperature,
    )
