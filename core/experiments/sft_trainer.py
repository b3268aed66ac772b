"""The loop of experiments that train on files: take a batch, update, report."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from core.algorithms.base import Objective
from core.data.datasets import Rows
from core.data.stored_batch import BatchWriter, assemble
from core.monitoring.metrics import DRIVER, SkippedUpdates, peak_gib
from core.monitoring.monitor import Monitor, StepTimer
from core.recovery.memory import MemoryLimits
from core.recovery.recover import RunState
from core.train.periodic import PeriodicActions
from core.trainer import EngineRef
from mcore_adapter.data.batch import PAIR
from rollout.experience import Schedule

if TYPE_CHECKING:
    from torch import Tensor

    from mcore_adapter.data.batch import PackedBatch


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
            step=step, epoch=epoch, total_epochs=self._schedule.num_epochs, epoch_step=epoch_step,
            epoch_steps=self._schedule.steps_of_epoch(epoch),
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
        self._monitor.evaluation(step, means)
