"""Experiments on files: supervised fine-tuning, and direct preference optimization on pairs of answers. Their loop
takes a batch, updates and reports.

The same ranks, engine, checkpoints and log lines as PPO, without generators. The reference of DPO has the ranks and the
layout of the policy; its log-probabilities are computed for each batch.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, cast

from torch import Tensor

from allocation import Allocation
from core.algorithms.base import Objective, sent_weights
from core.algorithms.offline import DPO, SFT
from core.config.experiments import DPOConfig, SFTConfig
from core.data.datasets import Rows, opener
from core.data.stored_batch import BatchWriter, assemble
from core.experiments.context import RunContext, Start
from core.experiments.workers import TrainedEngines, trainer_groups
from core.launch.cluster import Cluster
from core.monitoring.logs import NOTICE
from core.monitoring.metrics import DRIVER, SkippedUpdates, peak_gib
from core.monitoring.monitor import Monitor, StepTimer
from core.monitoring.screen import Screen
from core.placement import resolve_allocation
from core.processes.stacks import forget_modules
from core.runs.checkpoints import State
from core.runs.paths import RunPaths
from core.train.periodic import PeriodicActions, SerialEvaluations, schedule_from_control
from core.train.recover import MemoryLimits, RunState
from core.trainer import EngineRef
from mcore_adapter.data.batch import PAIR, ModelOutput, PackedBatch, Sequences, sequence_of_token, weigh_tokens
from rollout.data.source import DatasetError
from rollout.experience import Schedule

if TYPE_CHECKING:
    from core.processes.supervise import Attempt

logger = logging.getLogger(__name__)


class SFTTrainer:
    """Take a batch, update, report."""

    HEADLINE: ClassVar = "loss"

    def __init__(
        self,
        *,
        engine: EngineRef,
        reference: EngineRef | None,
        objective: Objective,
        train: Rows,
        valid: Rows | None,
        schedule: Schedule,
        valid_batch_size: int,
        monitor: Monitor,
        timer: StepTimer,
        memory: MemoryLimits,
        skipped_updates: SkippedUpdates,
    ) -> None:
        self._skipped_updates = skipped_updates
        self._engine, self._train, self._valid = engine, train, valid
        self._reference, self._objective, self._timer = reference, objective, timer
        self._schedule, self._monitor, self._memory = schedule, monitor, memory
        self._valid_batch_size = valid_batch_size

    def run(self, start: RunState, periodic: PeriodicActions) -> None:
        """Train from `start` to the end of the schedule; periodic saves and evaluates when due."""
        for step in range(start.step + 1, self._schedule.total_steps + 1):
            with periodic.whole_step():
                self._step(step, periodic)

    def _step(self, step: int, periodic: PeriodicActions) -> None:
        """Train on the batch of `step`, counting from 1; save, evaluate and report."""
        timer = self._timer
        epoch, epoch_step = self._schedule.position(step)
        with timer("data"):
            batch = self._train.batch(epoch, epoch_step, self._schedule.batch_size)
            writer = self._open(batch, trains=True)
        with timer("data" if self._reference is None else "ref log-probs"):
            self._add_fields(writer, batch)
        with timer("update"):
            metrics = self._engine.train_step(0, self._objective, self._memory)
        metrics = self.summary(metrics) | metrics
        self._skipped_updates.check(step, metrics)
        periodic.after_step(step, timer)
        self._monitor.rpc("trainDefault", metrics)
        seconds, phases = timer.finish()
        self._monitor.step(
            step=step, mean_batch_tokens=self._train.mean_tokens * self._schedule.batch_size, seconds=seconds,
            phases=phases,
            metrics={
                **metrics, "n_tokens": float(batch.num_tokens), "n_seqs": float(batch.num_sequences),
                **self._engine.group.memory, DRIVER: peak_gib(),
            },
            headline=f"{self.HEADLINE} {metrics[self.HEADLINE]:.3f}",
        )  # fmt: skip
        periodic.after_report(step, timer)

    def sums(self, batch: PackedBatch, fields: dict[str, Tensor], logprobs: Tensor) -> tuple[dict[str, float], float]:
        """Return sums of metrics over a validation batch, and what their totals are divided by."""
        return {"nll": -float((logprobs * batch.loss_mask).sum())}, float(batch.loss_mask.sum())

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        """Return what a step or an evaluation reports, from its mean metrics."""
        return {"loss": means["nll"], "ppl": math.exp(min(means["nll"], 700.0))}

    def _open(self, batch: PackedBatch, *, trains: bool) -> BatchWriter:
        """Place a batch in the object store for the ranks; one minibatch of all of it where they train."""
        group, pair = self._engine.group, batch.fields.get(PAIR)
        uses = [self._engine.use(self._memory, trains=trains)]
        uses += [self._reference.use(self._memory, trains=False)] if self._reference is not None else []
        writer = BatchWriter(
            group.place, token_ids=batch.token_ids.numpy(), cu_seqlens=batch.cu_seqlens.numpy(),
            loss_mask=batch.loss_mask.numpy(), minibatches=[range(batch.num_sequences)], uses=uses,
            units=None if pair is None else pair[batch.cu_seqlens[:-1]].abs().numpy(),
        )  # fmt: skip
        group.open_batch(group.put(writer.stored))
        return writer

    def _fields(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Return what the loss needs beside the log-probabilities of the model, [T] each; the batch is open."""
        if self._reference is None:
            return dict(batch.fields)
        results = self._engine.group.get(self._reference.infer(self._memory))
        return {**batch.fields, "ref_logprobs": assemble(results, batch.cu_seqlens.numpy())}

    def _add_fields(self, writer: BatchWriter, batch: PackedBatch) -> None:
        """Place what the ranks train on beside the tokens."""
        group, objective = self._engine.group, self._objective
        arrays = {name: value.numpy() for name, value in self._fields(batch).items()}
        group.add_fields(group.put(writer.put_fields(arrays, {self._engine.name: sent_weights(objective)})))

    def evaluate(self, step: int) -> None:
        """Compute summary() over the validation set."""
        assert self._valid is not None, "evaluation is due only with a validation set"
        totals: dict[str, float] = {}
        count = 0.0
        for batch in self._valid.in_order(self._valid_batch_size):
            self._open(batch, trains=False)
            results = self._engine.group.get(self._engine.infer(self._memory))
            sums, divisor = self.sums(batch, self._fields(batch), assemble(results, batch.cu_seqlens.numpy()))
            totals = {name: totals.get(name, 0.0) + value for name, value in sums.items()}
            count += divisor
        means = self.summary({name: total / count for name, total in totals.items()})
        self._monitor.evaluation(step, means)


ENGINE = "default"
"""The tutorial's name of the model that SFT trains; part of the path of a saved model."""


def run_sft(config: SFTConfig, paths: RunPaths, screen: Screen, attempt: Attempt) -> None:
    """Run one attempt: train from the beginning, or from the newest recover checkpoint."""
    run_offline(config, paths, screen, attempt, trainer_type=SFTTrainer, objective=SFT())


def run_offline(
    config: SFTConfig | DPOConfig,
    paths: RunPaths,
    screen: Screen,
    attempt: Attempt,
    *,
    trainer_type: type[SFTTrainer],
    objective: Objective,
) -> None:
    """Train on files."""
    allocation = resolve_allocation(config)
    context = RunContext.open(config, paths, screen, attempt)
    screen.begin("reading the data")
    train, valid = _open_data(config)
    _check_same_rows(train, context.start, ignore_changes=context.ignores_changes)
    schedule = schedule_from_control(config.exp_ctrl, num_prompts=len(train), batch_size=config.batch_size)
    context = context.fitted_to(schedule)
    memory, start = context.memory, context.start
    screen.begin("starting Ray")
    with context.cluster(num_actors=len(allocation.trainer.slots)) as cluster:
        screen.begin("starting the processes and loading the model")
        cluster.reserve(allocation)
        engine, ref = _start_engines(config, allocation, cluster, schedule.total_steps)
        engines = TrainedEngines([engine])
        if start.checkpoint is not None:
            engines.load(start.checkpoint)
            done = start.state.step
            logger.info("Recovered from %s: %d steps are done.", start.checkpoint, done, extra=NOTICE)
        if config.recovers:
            engines.prepare_saves()
        forget_modules()
        screen.begin("training the first step")
        with context.monitor(schedule) as monitor:
            trainer = trainer_type(
                engine=engine, reference=ref, objective=objective, train=train, valid=valid, schedule=schedule,
                valid_batch_size=config.dataset.valid_bs_n_seqs, monitor=monitor, memory=memory,
                skipped_updates=context.skipped_updates(), timer=context.timer(),
            )  # fmt: skip
            periodic = context.periodic(
                schedule,
                engines=engines,
                tokenizer_from=config.model_folder,
                evaluations=SerialEvaluations(trainer.evaluate) if valid is not None else None,
                rollout_state=train.state_dict,
                driver_state=lambda: (monitor.elapsed_seconds, {"memory": memory.state_dict()}),
            )
            with context.recover, periodic.saved_at_interrupt():
                trainer.run(start.state, periodic)


def _open_data(config: SFTConfig | DPOConfig) -> tuple[Rows, Rows | None]:
    """Read the training set, and the validation set if there is one."""
    open_one = opener(config)
    train, *valid = (open_one(source) for _, source in config.data_sources)
    return train, valid[0] if valid else None


def _check_same_rows(train: Rows, start: Start, *, ignore_changes: bool) -> None:
    """Raise DatasetError where the checkpoint has other rows or another order, unless recover_ignore_changes is set."""
    if start.rollout_state is None:
        return
    try:
        train.check_continues(cast("State", start.rollout_state))
    except DatasetError as change:
        if not ignore_changes:
            raise
        logger.warning("%s. Ignored: step %d continues with these rows.", change, start.state.step)


def _start_engines(
    config: SFTConfig | DPOConfig, allocation: Allocation, cluster: Cluster, total_updates: int
) -> tuple[EngineRef, EngineRef | None]:
    """Start the ranks and load the model, and the reference, where there is one, on the same ranks."""
    groups = trainer_groups(config, allocation, cluster)
    limit = config.max_tokens_per_mb()
    engine = EngineRef(
        group=groups.group(allocation.trainer),
        name=ENGINE,
        train_role="allocation",
        inference_role="allocation",
        train_tokens_per_mb=limit,
        inference_tokens_per_mb=limit,
    )
    groups.wait_started()
    engine.group.build(engine.name, config.engine_model("model", total_updates=total_updates))
    if "ref" not in config.models:
        return engine, None
    ref = replace(engine, name="ref")
    ref.group.build(ref.name, config.engine_model(ref.name))
    return engine, ref


class DPOTrainer(SFTTrainer):
    """Take pairs, compute the reference's log-probabilities, update, report."""

    HEADLINE = "preference_loss"

    def sums(self, batch: PackedBatch, fields: dict[str, Tensor], logprobs: Tensor) -> tuple[dict[str, float], float]:
        """Return the sums of loss and metrics over the pairs of a validation batch, and the number of pairs."""
        weighed, divisors = weigh_tokens(batch.with_fields(**fields), self._objective.token_weights)
        lens = batch.seq_lens
        sequences = Sequences(of_token=sequence_of_token(lens), count=len(lens))
        known = {**weighed.fields, "loss_mask": batch.loss_mask}
        _, metrics = self._objective.loss(ModelOutput(logprobs=logprobs), known, sequences)
        count = float(batch.num_sequences // 2)
        return {name: float(value) / divisors.metrics * count for name, value in metrics.items()}, count

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a step or an evaluation from means over pairs."""
        return {"loss": means["preference_loss"], **means}


def run_dpo(config: DPOConfig, paths: RunPaths, screen: Screen, attempt: Attempt) -> None:
    """Run one attempt: train from the beginning, or from the newest recover checkpoint."""
    run_offline(config, paths, screen, attempt, trainer_type=DPOTrainer, objective=DPO.of(config.dpo))
