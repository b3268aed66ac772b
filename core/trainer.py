"""The loop: take a batch, score it, advantages, minibatch updates, push weights, report, save.

Everything it drives (the algorithm, trainer ranks, generators, the rollout side, the monitor) is handed in; it depends
on no algorithm and on no process. Invariant: step i (from 0) trains at version i and ends with version i + 1
everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from core.algorithms.base import Algorithm, Objective, Pass, Unit
from core.data.rollout_batch import RolloutBatch
from core.monitoring.monitor import Monitor, StepTimer
from core.recovery.memory import MemoryLimits
from core.recovery.recover import RunState
from rollout.experience import Schedule

if TYPE_CHECKING:
    from core.launch.rollout_client import RolloutClient
    from core.launch.trainer_group import TrainerGroup
    from core.periodic import PeriodicActions
    from core.weight_sync.base import RunPush
    from mcore_adapter.data.batch import PackedBatch
    from mcore_adapter.engine import LossFn

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """Per-token results of a model that an algorithm may need before the update."""

    name: Pass
    phase: str
    method: Literal["logprobs", "values"]
    field: str
    engine: EngineRef
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Update:
    """The updates of one model in a step."""

    phase: str
    engine: EngineRef
    objective: Objective
    prefix: str
    """Of its metrics."""
    options: Mapping[str, Any]


class PPOTrainer:
    """The training loop of any algorithm (see core/algorithms/base.py): takes, scores, updates, pushes, reports."""

    def __init__(
        self,
        *,
        actor: EngineRef,
        critic: EngineRef | None,
        reference: EngineRef | None,
        rollout: RolloutClient,
        weights: RunPush,
        memory: MemoryLimits,
        algorithm: Algorithm,
        num_minibatches: int,
        temperature: float,
        schedule: Schedule,
        monitor: Monitor,
        timer: StepTimer,
        mean_batch_tokens: float,
    ) -> None:
        self._actor, self._algorithm = actor, algorithm
        self._passes = _passes(actor, critic, reference, temperature)
        self._updates = _updates(actor, critic, algorithm, temperature)
        self._rollout, self._weights, self._memory = rollout, weights, memory
        self._num_minibatches, self._schedule, self._monitor = num_minibatches, schedule, monitor
        self._mean_batch_tokens = mean_batch_tokens
        self._timer = timer

    def run(self, start: RunState, periodic: PeriodicActions) -> None:
        """Train from `start` to the end of the schedule; periodic saves and evaluates when due."""
        self._algorithm.load_state_dict(start.extra)
        for step in range(start.step, self._schedule.total_steps):
            with self._timer("wait for rollout"):
                rollout, figures = self._rollout.take(step, meanwhile=self._weights.sync_rejoined)
            with self._timer("offload generators"):
                self._weights.offload_generators()
            routing_replay = rollout.routing_replay()
            batch, metrics = self._score(rollout, routing_replay)
            minibatches = deal_minibatches(units_of(rollout, self._algorithm.unit), self._num_minibatches, seed=step)
            metrics |= self._update(batch, routing_replay, minibatches)
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
        return {**self._algorithm.state_dict(), "memory": self._memory.state_dict()}

    def _score(
        self, rollout: RolloutBatch, routing_replay: Mapping[str, Tensor]
    ) -> tuple[PackedBatch, dict[str, float]]:
        """Run the passes of the algorithm over a batch, and add what it trains on as fields."""
        batch, algorithm = rollout.to_packed(), self._algorithm
        fields: dict[str, Tensor] = {}
        handles: dict[bool, Any] = {}
        for needed in (p for p in self._passes if p.name in algorithm.passes):
            replays = needed.engine is self._actor and bool(routing_replay)
            source = batch.with_fields(**routing_replay) if replays else batch
            with self._timer(needed.phase):
                if replays not in handles:
                    handles[replays] = needed.engine.group.put(source)
                fields[needed.field] = needed.engine.per_token(
                    needed.method, source, handles[replays], self._memory, **needed.options
                )
        with self._timer("advantages"):
            known = {**batch.fields, **fields, "loss_mask": batch.loss_mask}
            trained_on, metrics = algorithm.advantages(rollout, known)
        return batch.with_fields(**fields, **trained_on), metrics | _figures_of(rollout, batch)

    def _update(
        self, batch: PackedBatch, routing_replay: Mapping[str, Tensor], minibatches: list[list[int]]
    ) -> dict[str, float]:
        """Run one pass over the batch in minibatches: critic first, as the actor's advantages are already fixed.
        `routing_replay` is for the actor alone: other models have experts of their own."""
        metrics: dict[str, float] = {}
        for update in self._updates:
            source = batch.with_fields(**routing_replay) if update.engine is self._actor else batch
            with self._timer(update.phase):
                metrics |= self._train(update, source, minibatches)
        return metrics

    def _train(self, update: _Update, batch: PackedBatch, minibatches: list[list[int]]) -> dict[str, float]:
        """Metrics averaged over the minibatches; `loss`, `grad_norm`, `lr` ... get the prefix."""
        engine, objective = update.engine, update.objective
        handle = engine.group.put(batch)
        every = [
            engine.train_step(
                handle, sequences, objective.loss, self._memory, token_weights=objective.token_weights,
                with_entropy=objective.needs_entropy, **update.options,
            )
            for sequences in minibatches
        ]  # fmt: skip
        return {update.prefix + k: float(np.mean([m[k] for m in every])) for k in every[0]}

    def _report(
        self, step: int, rollout: RolloutBatch, metrics: dict[str, float], figures: Mapping[str, float]
    ) -> None:
        # The order of the tutorial's line: what the loss says, then what the rewards say, then what is ours.
        first = ("ppo_approx_kl", "actor_loss", "actor_clip_ratio", "importance_weight")
        rewards = (
            "task_reward", "kl_reward", "final_reward", "advantage", "avg_seq_len", "avg_prompt_len", "n_tokens",
            "n_valid_tokens", "n_seqs", "no_eos_ratio", "disable_value", "mask_no_eos_with_zero",
        )  # fmt: skip
        ordered = {k: metrics[k] for k in first + rewards if k in metrics}
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


def _passes(actor: EngineRef, critic: EngineRef | None, reference: EngineRef | None, temperature: float) -> list[_Pass]:
    """The passes that these models can run, in the order in which they run."""
    at_temperature = {"temperature": temperature}
    passes = [
        _Pass(
            name="old_logprobs", phase="old log-probs", method="logprobs", field="old_logprobs", engine=actor,
            options=at_temperature,
        )
    ]  # fmt: skip
    if reference is not None:
        passes.append(
            _Pass(
                name="ref_logprobs", phase="ref log-probs", method="logprobs", field="ref_logprobs", engine=reference,
                options=at_temperature,
            )
        )  # fmt: skip
    if critic is not None:
        passes.append(
            _Pass(name="values", phase="values", method="values", field="old_values", engine=critic, options={})
        )
    return passes


def _updates(actor: EngineRef, critic: EngineRef | None, algorithm: Algorithm, temperature: float) -> list[_Update]:
    """The models that a step updates, in this order."""
    updates = [
        _Update(phase="update", engine=actor, objective=algorithm, prefix="", options={"temperature": temperature})
    ]
    if critic is not None and algorithm.critic is not None:
        first = _Update(phase="critic update", engine=critic, objective=algorithm.critic, prefix="critic_", options={})
        updates.insert(0, first)
    return updates


def _figures_of(rollout: RolloutBatch, batch: PackedBatch) -> dict[str, float]:
    """What every step reports about the shape of its batch."""
    return {
        "avg_seq_len": float(batch.seq_lens.float().mean()),
        "avg_prompt_len": float(rollout.prompt_lens.mean()),
        "n_tokens": float((rollout.versions >= 0).sum()),
        "n_valid_tokens": float(batch.loss_mask.sum()),
        "n_seqs": float(rollout.num_sequences),
        "no_eos_ratio": float(rollout.no_eos.mean()),
    }


def units_of(rollout: RolloutBatch, unit: Unit) -> np.ndarray:
    """The unit of each sequence, [N] int64, from 0 on without gaps. Raises ValueError where a pair is incomplete."""
    if unit == "sequence":
        return np.arange(rollout.num_sequences)
    if unit == "group":
        return rollout.group_ids
    if (np.bincount(rollout.group_ids) % 2).any():
        raise ValueError("algorithms of pairs need an even number of answers to each prompt; set group_size to one")
    return np.arange(rollout.num_sequences) // 2  # a group's sequences are adjacent


def deal_minibatches(units: np.ndarray, count: int, *, seed: int) -> list[list[int]]:
    """Deal the sequences at random into `count` minibatches of whole units.

    Where every sequence is a unit, these are the parts of split_minibatches(), whatever the algorithm."""
    parts = split_minibatches(int(units.max()) + 1, count, seed=seed)
    members: list[list[int]] = [[] for _ in range(int(units.max()) + 1)]
    for sequence, unit in enumerate(units.tolist()):
        members[unit].append(sequence)
    return [sorted(i for unit in part for i in members[unit]) for part in parts]


def split_minibatches(num_units: int, count: int, *, seed: int) -> list[list[int]]:
    """Deal the numbers of sequences, or of other units, at random into `count` parts whose sizes differ by at most one;
    none is empty."""
    order = np.random.default_rng(seed).permutation(num_units)
    return [sorted(map(int, part)) for part in np.array_split(order, min(count, num_units))]
