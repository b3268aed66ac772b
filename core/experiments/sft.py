"""Experiments on files: supervised fine-tuning, and direct preference optimization on pairs of answers.

The same ranks, engine, checkpoints and log lines as PPO, without generators. The reference of DPO has the ranks and the
layout of the policy; its log-probabilities are computed for each batch.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from core.algorithms.base import Objective
from core.algorithms.offline import DPO, SFT
from core.data.datasets import Rows
from core.data.offline import opener
from core.experiments.common import Start
from core.experiments.context import RunContext
from core.experiments.sft_trainer import SFTTrainer
from core.experiments.workers import TrainedEngines, TrainerGroups, threads_per_process
from core.launch.cluster import Cluster
from core.monitoring.metrics import SkippedUpdates
from core.placement.allocation import resolve_allocation
from core.processes.stacks import forget_modules
from core.train.periodic import SerialEvaluations, schedule_from_control
from core.trainer import EngineRef
from mcore_adapter.data.batch import ModelOutput, sequence_of_token
from mcore_adapter.data.sequences import Sequences, weigh_tokens
from mcore_adapter.settings import EngineModel
from rollout.data.source import DatasetError

if TYPE_CHECKING:
    from allocation import Allocation
    from core.config.experiments import DPOConfig, SFTConfig
    from core.config.models import ModelTrainEvalConfig
    from core.monitoring.screen import Screen
    from core.processes.supervise import Attempt
    from core.runs.paths import RunPaths
    from mcore_adapter.data.batch import PackedBatch

logger = logging.getLogger(__name__)

ENGINE = "default"
"""The tutorial's name of the model that SFT trains; part of the path of a saved model."""


def run_sft(config: SFTConfig, paths: RunPaths, screen: Screen, attempt: Attempt) -> None:
    """Run one attempt: train from the beginning, or from the newest recover checkpoint."""
    run_offline(config, paths, screen, attempt, trainer_type=SFTTrainer, objective=SFT(), reference=None)


def run_offline(
    config: SFTConfig | DPOConfig,
    paths: RunPaths,
    screen: Screen,
    attempt: Attempt,
    *,
    trainer_type: type[SFTTrainer],
    objective: Objective,
    reference: tuple[ModelTrainEvalConfig, str] | None,
) -> None:
    """Train on files. `reference`: section and folder of a model that stays as it is."""
    allocation, data = resolve_allocation(config), config.dataset
    context = RunContext.open(config, paths, screen, attempt)
    screen.begin("reading the data")
    train, valid = _open_data(config)
    _check_same_rows(train, context.start, ignore_changes=config.recover_ignore_changes)
    schedule = schedule_from_control(config.exp_ctrl, num_prompts=len(train), batch_size=data.train_bs_n_seqs)
    context = context.fitted_to(schedule)
    memory, start = context.memory, context.start
    screen.begin("starting Ray")
    with context.cluster(num_actors=len(allocation.trainer.slots)) as cluster:
        screen.begin("starting the processes and loading the model")
        cluster.reserve(allocation)
        engine, ref = _start_engines(config, allocation, cluster, schedule.total_steps, reference)
        engines = TrainedEngines([engine])
        if start.checkpoint is not None:
            engines.load(start.checkpoint)
            logger.info("Recovered from %s: %d steps are done.", start.checkpoint, start.state.step)
        if config.recovers:
            engines.prepare_saves()
        forget_modules()
        screen.begin("training the first step")
        with context.monitor(schedule) as monitor:
            trainer = trainer_type(
                engine=engine, reference=ref, objective=objective, train=train, valid=valid, schedule=schedule,
                batch_size=data.train_bs_n_seqs, valid_batch_size=data.valid_bs_n_seqs, monitor=monitor, memory=memory,
                skipped_updates=SkippedUpdates(config.exp_ctrl.max_skipped_steps), timer=context.timer(),
            )  # fmt: skip
            periodic = context.periodic(
                schedule,
                engines=engines,
                tokenizer_from=config.model.path,
                evaluations=SerialEvaluations(trainer.evaluate) if valid is not None else None,
                rollout_state=train.state_dict,
                driver_state=lambda: (monitor.elapsed_seconds, {"memory": memory.state_dict()}),
            )
            with context.recover, periodic.saved_at_interrupt():
                trainer.run(start.state, periodic)


def _open_data(config: SFTConfig | DPOConfig) -> tuple[Rows, Rows | None]:
    """Read the training set, and the validation set if there is one."""
    data, open_one = config.dataset, opener(config)
    train = open_one(data.source(data.train_path))
    return train, open_one(data.valid_source) if data.valid_source else None


def _check_same_rows(train: Rows, start: Start, *, ignore_changes: bool) -> None:
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
    launch = config.launch
    threads = threads_per_process(
        allocation, configured=launch.threads_per_process, max_staleness=0, gpus=allocation.trainer.on_gpu
    )
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
    groups.wait_started()
    model = EngineModel(config=config.model, path=config.model.path, seed=config.seed, total_updates=total_updates)
    engine.group.build(engine.name, model)
    if reference is None:
        return engine, None
    ref = replace(engine, name="ref")
    ref.group.build(ref.name, EngineModel(config=reference[0], path=reference[1], seed=config.seed))
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
    dpo = config.dpo
    run_offline(
        config, paths, screen, attempt,
        trainer_type=DPOTrainer,
        objective=DPO(beta=dpo.beta, kind=dpo.loss, label_smoothing=dpo.label_smoothing),
        reference=(config.ref, config.ref_path),
    )  # fmt: skip
