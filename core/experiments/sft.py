"""Supervised fine-tuning: the same ranks, engine, checkpoints and log lines as PPO, without generators.

core/experiments/dpo.py runs the same loop on pairs of answers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from core.algorithms.base import Objective
from core.algorithms.sft import SFT
from core.config.allocation import resolve_allocation
from core.config.ray_address import joined_cluster
from core.data.answers import AnswerDataset
from core.data.batch_writer import BatchWriter, assemble
from core.data.epochs import EpochBatches
from core.experiments.common import (
    Start,
    find_start,
    fit_to_schedule,
    metric_sinks,
    open_trackers,
    rows_that_stay,
    save_model,
)
from core.experiments.workers import TrainedEngines, TrainerGroups, build_engine, threads_per_process
from core.launch.cluster import Cluster
from core.monitoring.memory import DRIVER, peak_gib
from core.monitoring.monitor import Monitor, StepTimer
from core.monitoring.skipped_updates import SkippedUpdates
from core.periodic import Actions, PeriodicActions
from core.processes.stacks import forget_modules
from core.recovery.memory import MemoryLimits
from core.recovery.recover import RecoverStore, RunState
from core.schedule import schedule_from_control
from core.trainer import EngineRef
from mcore_adapter.data.batch import PAIR
from rollout.data.encoder import Encoder
from rollout.data.source import DatasetError
from rollout.data.tokenizer import load_tokenizer
from rollout.experience import Schedule
from tracing import record_spans

if TYPE_CHECKING:
    from rich.console import Console

    from allocation import Allocation
    from core.config.experiments import DPOConfig, SFTConfig
    from core.config.models import ModelTrainEvalConfig
    from core.paths import RunPaths
    from core.processes.supervise import Attempt
    from mcore_adapter.data.batch import PackedBatch

logger = logging.getLogger(__name__)

Data = EpochBatches[Any]

ENGINE = "default"
"""The tutorial's name of the model that SFT trains; part of the path of a saved model."""


class SFTTrainer:
    """Take a batch, update, report."""

    HEADLINE: ClassVar = "loss"

    def __init__(
        self,
        *,
        engine: EngineRef,
        reference: EngineRef | None,
        objective: Objective,
        train: Data,
        valid: Data | None,
        schedule: Schedule,
        batch_size: int,
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
        self._batch_size, self._valid_batch_size = batch_size, valid_batch_size

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
            batch = self._train.batch(epoch, epoch_step, self._batch_size)
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
            step=step, epoch=epoch, total_epochs=self._schedule.total_epochs, epoch_step=epoch_step,
            steps_per_epoch=self._schedule.steps_per_epoch,
            mean_batch_tokens=self._train.mean_tokens * self._batch_size, seconds=seconds, phases=phases,
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
            group.put, token_ids=batch.token_ids.numpy(), cu_seqlens=batch.cu_seqlens.numpy(),
            loss_mask=batch.loss_mask.numpy(), minibatches=[range(batch.num_sequences)], uses=uses,
            units=None if pair is None else pair[batch.cu_seqlens[:-1]].abs().numpy(),
        )  # fmt: skip
        group.open_batch(group.put(writer.stored))
        return writer

    def _fields(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Return what the loss needs beside the log-probabilities of the model, [T] each; the batch is open."""
        if self._reference is None:
            return dict(batch.fields)
        results = self._engine.group.get(self._reference.logprobs(self._memory))
        return {**batch.fields, "ref_logprobs": assemble(results, batch.cu_seqlens.numpy())}

    def _add_fields(self, writer: BatchWriter, batch: PackedBatch) -> None:
        """Place what the ranks train on beside the tokens."""
        group, objective = self._engine.group, self._objective
        arrays = {name: value.numpy() for name, value in self._fields(batch).items()}
        weights = None if objective.weighs_alike else objective.token_weights
        group.add_fields(group.put(writer.put_fields(arrays, {self._engine.name: weights})))

    def evaluate(self, step: int) -> None:
        """Compute summary() over the validation set."""
        assert self._valid is not None, "evaluation is due only with a validation set"
        totals: dict[str, float] = {}
        count = 0.0
        for batch in self._valid.in_order(self._valid_batch_size):
            self._open(batch, trains=False)
            results = self._engine.group.get(self._engine.logprobs(self._memory))
            sums, divisor = self.sums(batch, self._fields(batch), assemble(results, batch.cu_seqlens.numpy()))
            totals = {name: totals.get(name, 0.0) + value for name, value in sums.items()}
            count += divisor
        means = self.summary({name: total / count for name, total in totals.items()})
        result = {f"eval/{name}": value for name, value in means.items()}
        self._monitor.rpc("evaluate", result)
        self._monitor.write(step, result)


def run_sft(config: SFTConfig, paths: RunPaths, console: Console, attempt: Attempt) -> None:
    """Train, in one life of all processes, from the beginning or from the newest recover checkpoint."""
    run_offline(
        config, paths, console, attempt, trainer_type=SFTTrainer, objective=SFT(), open_data=AnswerDataset,
        reference=None,
    )  # fmt: skip


def run_offline(
    config: SFTConfig | DPOConfig,
    paths: RunPaths,
    console: Console,
    attempt: Attempt,
    *,
    trainer_type: type[SFTTrainer],
    objective: Objective,
    open_data: Callable[..., Data],
    reference: tuple[ModelTrainEvalConfig, str] | None,
) -> None:
    """Train on files. `open_data`: called with a data set, an encoder, max_seqlen, seed and shuffle. `reference`:
    section and folder of a model that stays as it is."""
    record_spans("driver", paths.logs, limit_mib=config.monitor.timeline_mib)
    allocation = resolve_allocation(config)
    data, patience = config.dataset, config.launch.startup_timeout_seconds
    recover = RecoverStore(
        paths.recover,
        config.run_identity,
        keep=config.recover_keep,
        timeout_seconds=config.deadlines.call_seconds,
    )
    start = find_start(recover, config, paths.recover)
    attempt.tell(began=start.state.step, step=start.state.step)
    trackers = open_trackers(config, paths)
    memory = MemoryLimits(attempt.memory, tell=lambda learnt: attempt.tell(memory=learnt))
    memory.load_state_dict(start.state.extra.get("memory", {}))  # type: ignore[arg-type]
    encoder = Encoder(
        load_tokenizer(config.model.path),
        config.prompt.prompt_format(boxed=False),
        folder=config.model.path,
    )
    options: dict[str, Any] = {"max_seqlen": data.max_seqlen, "seed": config.seed, "shuffle": config.shuffle_dataset}
    train = open_data(data.source(data.train_path), encoder, **options)
    valid = open_data(data.valid_source, encoder, **options) if data.valid_source else None
    _check_same_rows(train, start, ignore_changes=config.recover_ignore_changes)
    schedule = schedule_from_control(config.exp_ctrl, num_prompts=len(train), batch_size=data.train_bs_n_seqs)
    start = fit_to_schedule(start, schedule)
    with Cluster(
        joined=joined_cluster(config),
        envs=config.external_configs.envs,
        num_actors=len(allocation.trainer.slots),
        startup_timeout_seconds=patience,
        deadlines=config.deadlines,
        log_folder=paths.logs,
    ) as cluster:
        cluster.reserve(allocation)
        engine, ref = _start_engines(config, allocation, cluster, schedule.total_steps, reference)
        engines = TrainedEngines([engine])
        if start.checkpoint is not None:
            engines.load(start.checkpoint)
            logger.info("Recovered from %s: %d steps are done.", start.checkpoint, start.state.step)
        if config.recovers:
            engines.prepare_saves()
        forget_modules()
        with Monitor(
            console=console,
            sinks=[*metric_sinks(config, paths, continue_after=rows_that_stay(start)), *trackers],
            consumed=None,
            total_steps=schedule.total_steps,
            done_steps=start.state.step,
            elapsed=start.state.elapsed_seconds,
        ) as monitor:
            trainer = trainer_type(
                engine=engine, reference=ref, objective=objective, train=train, valid=valid, schedule=schedule,
                batch_size=data.train_bs_n_seqs, valid_batch_size=data.valid_bs_n_seqs, monitor=monitor, memory=memory,
                skipped_updates=SkippedUpdates(config.exp_ctrl.max_skipped_steps),
                timer=StepTimer(lambda phase: attempt.tell(phase=phase)),
            )  # fmt: skip
            periodic = PeriodicActions(
                schedule=schedule,
                control=config.exp_ctrl,
                actions=Actions(
                    tell_step=lambda step: attempt.tell(step=step),
                    evaluate=trainer.evaluate if valid is not None else None,
                    save_model=lambda name: save_model(
                        engines, paths.checkpoints, name, config.model.path, keep=config.exp_ctrl.save_keep
                    ),
                    begin_save=engines.begin_save,
                    rollout_state=train.state_dict,
                    driver_state=lambda: (monitor.elapsed_seconds, {"memory": memory.state_dict()}),
                ),
                recover=recover if config.recovers else None,
                start=start.state,
                interrupt_seconds=config.deadlines.interrupt_seconds,
            )
            with recover, periodic.saved_at_interrupt():
                trainer.run(start.state, periodic)


def _check_same_rows(train: Data, start: Start, *, ignore_changes: bool) -> None:
    """Raise DatasetError where the checkpoint has other rows or another order, unless recover_ignore_changes is set."""
    if start.rollout_state is None:
        return
    try:
        train.check_continues(start.rollout_state)
    except DatasetError as change:
        if not ignore_changes:
            raise
        logger.warning("%s. Ignored: step %d continues with these rows.", change, start.state.step)


def _start_engines(
    config: SFTConfig | DPOConfig,
    allocation: Allocation,
    cluster: Cluster,
    total_updates: int,
    reference: tuple[ModelTrainEvalConfig, str] | None,
) -> tuple[EngineRef, EngineRef | None]:
    """Start the ranks and load the model, and the reference on the same ranks."""
    launch, gpus = config.launch, allocation.trainer.on_gpu
    threads = threads_per_process(allocation, asked=launch.threads_per_process, max_staleness=0, gpus=gpus)
    groups = TrainerGroups(cluster, port=launch.master_port, threads=threads, seed=config.seed)
    limit = config.max_tokens_per_mb()
    engine = EngineRef(
        group=groups.group(allocation.trainer),
        name=ENGINE,
        train_role="allocation",
        inference_role="allocation",
        train_tokens_per_mb=limit,
        inference_tokens_per_mb=limit,
    )
    groups.wait_started(launch.startup_timeout_seconds)
    build_engine(
        engine, config.model, path=config.model.path, total_updates=total_updates, on_gpu=gpus,
        seed=config.seed,
    )  # fmt: skip
    if reference is None:
        return engine, None
    ref = replace(engine, name="ref")
    build_engine(ref, reference[0], path=reference[1], total_updates=None, on_gpu=gpus, seed=config.seed)
    return engine, ref
