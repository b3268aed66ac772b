"""The loop: take a batch, score it, advantages, minibatch updates, push weights, report, save.

Everything it drives (the algorithm, trainer ranks, generators, the rollout side, the monitor) is handed in; it depends
on no algorithm and on no process. Batches stay in the object store: the loop passes references on, and handles numbers.
Invariant: step i (from 0) trains at version i and ends with version i + 1 everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from core.algorithms.base import FIELDS, Algorithm, Objective, Pass
from core.data.stored_batch import InferencePass, Ref, UpdatePass, Use
from core.monitoring.metrics import DRIVER, Histogram, SkippedUpdates, largest, peak_gib
from core.monitoring.monitor import Monitor, StepTimer
from core.train.recover import MemoryLimits, RunState
from core.train.step_batch import BatchFacts, BatchRequest, SavedSteps, Scoring
from rollout.experience import Schedule

if TYPE_CHECKING:
    from core.launch.rollout_client import RolloutClient, ScoredBatch
    from core.launch.trainer_group import TrainerGroup
    from core.train.periodic import PeriodicActions
    from core.weight_sync.push import PushReport

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

    def use(self, memory: MemoryLimits, *, trains: bool) -> Use:
        """Return how this engine will cut the next batch."""
        role = self.train_role if trains else self.inference_role
        configured = self.train_tokens_per_mb if trains else self.inference_tokens_per_mb
        return Use(
            group=self.group.name,
            planner=self.group.planner(self.name),
            trains=trains,
            limits=memory.limits(role, configured),
        )

    def train_step(
        self, minibatch: int, objective: Objective, memory: MemoryLimits, *,
        temperature: float = 1.0, replay_routing: bool = False,
    ) -> dict[str, float]:  # fmt: skip
        """Run one update on a minibatch of the ranks' batch, in microbatches that fit."""
        return memory.fitting(
            self.train_role, self.train_tokens_per_mb,
            lambda limits: self.group.train_step(
                UpdatePass(
                    engine=self.name, minibatch=minibatch, loss=objective.loss, limits=limits, temperature=temperature,
                    with_entropy=objective.needs_entropy, replay_routing=replay_routing,
                )
            ),
        )  # fmt: skip

    def infer(
        self, memory: MemoryLimits, kind: Literal["logprobs", "values", "entropy"] = "logprobs", *,
        temperature: float = 1.0, replay_routing: bool = False,
    ) -> Sequence[Ref]:  # fmt: skip
        """Return references to log-probabilities or entropy, or a critic's values, of the ranks' batch, in microbatches
        that fit."""
        return memory.fitting(
            self.inference_role, self.inference_tokens_per_mb,
            lambda limits: self.group.infer(
                InferencePass(
                    engine=self.name, kind=kind, limits=limits, temperature=temperature, replay_routing=replay_routing
                )
            ),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """Per-token results of a model that an algorithm may need before the update."""

    name: Pass
    phase: str
    engine: EngineRef
    run: Callable[[MemoryLimits], Sequence[Ref]]


@dataclass(frozen=True, kw_only=True)
class _Update:
    """The updates of one model in a step."""

    phase: str
    engine: EngineRef
    objective: Objective
    prefix: str
    """Of its metrics."""
    sample_reuse: int
    """Passes over the minibatches."""
    run: Callable[[int, Objective, MemoryLimits], dict[str, float]]


class WeightUpdates(Protocol):
    """How the generators get new weights (core/weight_sync/push.py)."""

    def offload_generators(self) -> None: ...

    def push(self, version: int) -> PushReport: ...

    def sync_rejoined(self) -> None: ...


class PPOTrainer:
    """The training loop of any algorithm (see core/algorithms/base.py): takes, scores, updates, pushes, reports."""

    def __init__(
        self,
        *,
        actor: EngineRef,
        critic: EngineRef | None,
        reference: EngineRef | None,
        rollout: RolloutClient,
        weights: WeightUpdates,
        memory: MemoryLimits,
        algorithm: Algorithm,
        sample_reuse: tuple[int, int] = (1, 1),
        num_minibatches: int,
        temperature: float,
        schedule: Schedule,
        monitor: Monitor,
        timer: StepTimer,
        mean_batch_tokens: float,
        skipped_updates: SkippedUpdates | None = None,
        saved_steps: SavedSteps | None = None,
    ) -> None:
        """`sample_reuse`: passes of actor and critic over a batch. `skipped_updates`: ends a run that trains nothing.
        None: never."""
        self._skipped_updates, self._saved_steps = skipped_updates, saved_steps
        self._algorithm = algorithm
        self._passes = _passes(actor, critic, reference, temperature)
        self._updates = _updates(actor, critic, algorithm, temperature, sample_reuse)
        engines = [p.engine for p in self._passes] + [update.engine for update in self._updates]
        self._groups = list({engine.group.name: engine.group for engine in engines}.values())
        self._rollout, self._weights, self._memory = rollout, weights, memory
        self._num_minibatches, self._schedule, self._monitor = num_minibatches, schedule, monitor
        self._mean_batch_tokens = mean_batch_tokens
        self._timer = timer

    def run(self, start: RunState, periodic: PeriodicActions) -> None:
        """Train from `start` to the end of the schedule; periodic saves and evaluates when due."""
        if "algorithm" in start.extra:
            self._algorithm.load_state_dict(start.extra["algorithm"])  # type: ignore[arg-type]
        self._take(start.step)
        for step in range(start.step, self._schedule.total_steps):
            # Rollout process: leases the step's episodes and cuts them, while generators sample others.
            with self._timer("wait for rollout"):
                taken = self._rollout.wait_taken(meanwhile=self._weights.sync_rejoined)
            with periodic.whole_step():
                # Generators, where they share the GPUs of the trainer ranks.
                with self._timer("offload generators"):
                    self._weights.offload_generators()
                # Trainer ranks: passes without gradients; rollout process: advantages; trainer ranks: updates.
                for group in self._groups:
                    group.open_batch(taken.batch)
                facts, figures = taken.facts, taken.figures
                metrics = self._score(step, taken.scored) | facts.metrics
                metrics |= self._update(facts.num_minibatches)
                if self._skipped_updates is not None:
                    self._skipped_updates.check(step + 1, metrics)
                for group in self._groups:
                    group.close_batch()
                del taken  # frees its memory: the next batch is made during the push
                # Trainer ranks send, generators receive; meanwhile the rollout process leases the next batch.
                with self._timer("push"):
                    self._take(step + 1)
                    pushed = self._weights.push(step + 1)
                    self._rollout.set_version(step + 1)
                # Generators evaluate, trainer ranks save.
                periodic.after_step(step + 1, self._timer)
                figures |= pushed.metrics()
                self._report(step, facts, metrics, figures)
                periodic.after_report(step + 1, self._timer)

    @property
    def state(self) -> dict[str, object]:
        """State of this object for a recover checkpoint."""
        return {"algorithm": self._algorithm.state_dict(), "memory": self._memory.state_dict()}

    def _take(self, step: int) -> None:
        """Request the batch of `step`, if there is one, and send how it will be used. Its advantages are computed with
        it where they need no pass: the algorithm has its state of the next step already."""
        if step >= self._schedule.total_steps:
            return
        passes = self._needed(step)
        uses = [needed.engine.use(self._memory, trains=False) for needed in passes]
        uses += [update.engine.use(self._memory, trains=True) for update in self._updates]
        request = BatchRequest(
            unit=self._algorithm.unit, num_minibatches=self._num_minibatches, seed=step, version=step, uses=uses
        )
        self._rollout.take(request, None if passes else self._scoring)

    def _needed(self, step: int) -> list[_Pass]:
        """Return the passes of the algorithm, and the entropy for a step that is saved."""
        is_saved = self._saved_steps is not None and self._saved_steps.is_due(step + 1)
        names = self._algorithm.passes | ({"entropy"} if is_saved else set())
        return [p for p in self._passes if p.name in names]

    @property
    def _scoring(self) -> Scoring:
        objectives = {update.engine.name: update.objective for update in self._updates}
        return Scoring(algorithm=self._algorithm, objectives=objectives, saved=self._saved_steps)

    def _score(self, step: int, scored_before: ScoredBatch | None) -> dict[str, float]:
        """Run the passes of the algorithm over the batch, and add what it trains on as fields. `scored_before`: what
        came with the batch."""
        results = {}
        for needed in self._needed(step):
            with self._timer(needed.phase):
                results[FIELDS[needed.name]] = needed.run(self._memory)
        with self._timer("advantages"):
            if scored_before is None:
                fields, scored = self._rollout.score(self._scoring, results)
            else:
                fields, scored = scored_before
                self._rollout.write_samples()
            self._algorithm.load_state_dict(scored.algorithm_state)
            for group in self._groups:
                group.add_fields(fields)
        return scored.metrics

    def _update(self, num_minibatches: int) -> dict[str, float]:
        """Run the passes over the batch in minibatches: critic first, as the actor's advantages are already fixed.
        Return metrics averaged over the minibatches; `loss`, `grad_norm`, `lr` ... get the prefix."""
        metrics: dict[str, float] = {}
        for update in self._updates:
            with self._timer(update.phase):
                order = [*range(num_minibatches)] * update.sample_reuse
                every = [update.run(i, update.objective, self._memory) for i in order]
            metrics |= {update.prefix + k: float(np.mean([m[k] for m in every])) for k in every[0]}
        return metrics

    def _report(self, step: int, facts: BatchFacts, metrics: dict[str, float], figures: Mapping[str, float]) -> None:
        # The order of the tutorial's line: figures of the loss, then of the rewards, then our own.
        first = ("ppo_approx_kl", "actor_loss", "actor_clip_ratio", "importance_weight")
        rewards = (
            "task_reward", "kl_reward", "final_reward", "advantage", "avg_seq_len", "avg_prompt_len", "n_tokens",
            "n_valid_tokens", "n_seqs", "no_eos_ratio", "disable_value", "mask_no_eos_with_zero",
        )  # fmt: skip
        ordered = {k: metrics[k] for k in first + rewards if k in metrics}
        ordered |= {k: v for k, v in metrics.items() if k not in ordered}
        self._monitor.rpc("actor_train", ordered)
        if drawn := {name: value for name, value in figures.items() if name.startswith("dynamic_sampling/")}:
            self._monitor.rpc("rollout", drawn)
        ages = facts.ages
        self._monitor.staleness(ages)
        self._monitor.consumed(step + 1, facts.episodes)
        seconds, phases = self._timer.finish()
        ages_metrics: dict[str, float | Histogram] = {
            "staleness/mean": float(ages.mean()),
            "staleness/max": float(ages.max()),
            "staleness/ages": Histogram(ages),
        }
        self._monitor.step(
            step=step + 1, mean_batch_tokens=self._mean_batch_tokens, seconds=seconds, phases=phases,
            metrics={
                **ordered, **figures, **ages_metrics, "tokens_per_second": metrics["n_tokens"] / seconds,
                **largest(group.memory for group in self._groups), DRIVER: peak_gib(),
            },
            headline=f"task_reward {metrics['task_reward']:.3f}",
        )  # fmt: skip
        self._monitor.samples(step + 1, self._rollout.samples)


def _passes(actor: EngineRef, critic: EngineRef | None, reference: EngineRef | None, temperature: float) -> list[_Pass]:
    """Return the passes that these models can run, in the order in which they run. Only the policy uses the generators'
    experts: other models have experts of their own."""
    passes = [
        _Pass(
            name="old_logprobs", phase="old log-probs", engine=actor,
            run=partial(actor.infer, temperature=temperature, replay_routing=True),
        ),
        _Pass(
            name="entropy", phase="entropy", engine=actor,
            run=partial(actor.infer, kind="entropy", temperature=temperature, replay_routing=True),
        ),
    ]  # fmt: skip
    if reference is not None:
        passes.append(
            _Pass(
                name="ref_logprobs", phase="ref log-probs", engine=reference,
                run=partial(reference.infer, temperature=temperature),
            )
        )  # fmt: skip
    if critic is not None:
        passes.append(_Pass(name="values", phase="values", engine=critic, run=partial(critic.infer, kind="values")))
    return passes


def _updates(
    actor: EngineRef, critic: EngineRef | None, algorithm: Algorithm, temperature: float, sample_reuse: tuple[int, int]
) -> list[_Update]:
    """Return the models that a step updates, in this order; `sample_reuse`: of actor and critic."""
    run = partial(actor.train_step, temperature=temperature, replay_routing=True)
    updates = [
        _Update(
            phase="update", engine=actor, objective=algorithm, prefix="", sample_reuse=sample_reuse[0], run=run
        )
    ]  # fmt: skip
    if critic is not None and algorithm.critic is not None:
        first = _Update(
            phase="critic update", engine=critic, objective=algorithm.critic, prefix="critic_",
            sample_reuse=sample_reuse[1], run=critic.train_step,
        )  # fmt: skip
        updates.insert(0, first)
    return updates
