"""Puts a PPO run together: cluster, trainer ranks, generators, rollout side; then core/trainer.py takes over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from core.algorithms.build import build_algorithm
from core.algorithms.saved_steps import SavedSteps
from core.experiments.context import RunContext, wait_facts
from core.experiments.explore import bench, explore, serve
from core.experiments.workers import (
    TrainerSide,
    build_ppo_engines,
    make_push,
    start_generators,
    start_trainer,
)
from core.launch.remote import has_ended
from core.launch.rollout_client import BatchActor, RolloutActor, RolloutClient
from core.placement.allocation import resolve_allocation, transport_of
from core.processes.stacks import forget_modules
from core.train.periodic import Evaluations
from core.trainer import PPOTrainer
from core.weight_sync.folder import Publisher, VersionFolder
from core.weight_sync.push import PUSHED

if TYPE_CHECKING:
    from core.config.common import Job
    from core.config.experiments import PPOMATHConfig
    from core.explore.data import DataFacts
    from core.launch.generators import GeneratorPool
    from core.monitoring.screen import Screen
    from core.processes.supervise import Attempt
    from core.runs.paths import RunPaths
    from core.trainer import WeightUpdates
    from core.weight_sync.push import WeightPush
    from rollout.experience import Schedule

logger = logging.getLogger(__name__)


def run_ppo(config: PPOMATHConfig, paths: RunPaths, screen: Screen, attempt: Attempt) -> None:
    """Run one attempt of a job of any mode: from the beginning, or from the newest recover checkpoint."""
    # What the driver computes takes a millisecond; more threads would wait for the cores that the workers use.
    torch.set_num_threads(1)
    JOBS[config.job](config, RunContext.open(config, paths, screen, attempt))


def both(config: PPOMATHConfig, context: RunContext) -> None:
    """Explore and train in one job: the trainer pushes weights to its generators."""
    allocation, screen = resolve_allocation(config), context.screen
    num_actors = sum(len(role.slots) for role in allocation.roles.values()) + 1
    screen.begin("starting Ray")
    with context.cluster(num_actors=num_actors) as cluster:
        screen.begin("starting the processes")
        cluster.reserve(allocation)
        generators, rollout = start_generators(config, allocation, cluster, context.memory)
        trainer = start_trainer(config, allocation, cluster)
        trainer.groups.wait_started()
        facts, schedule = wait_facts(config, rollout)
        context = context.fitted_to(schedule)
        folder = context.paths.checkpoints / "push"
        ranks = trainer.actor.group
        transport = transport_of(config, allocation)
        weights = make_push(config, allocation, ranks, generators, rollout, transport=transport, folder=folder)
        load_beside(generators, weights, config, trainer, context, schedule, takes_turns=allocation.shares_gpus)
        _train(config, context, trainer, rollout, weights, schedule, facts, generators)
        rollout.close()
        weights.close()
        generators.close()


def train(config: PPOMATHConfig, context: RunContext) -> None:
    """Train on what explore jobs put into the store, and publish weights in a folder that they follow."""
    allocation, screen = resolve_allocation(config), context.screen
    ranks = allocation.only(*config.roles)
    screen.begin("starting Ray")
    with context.cluster(num_actors=sum(len(role.slots) for role in ranks.roles.values()) + 1) as cluster:
        screen.begin("starting the processes")
        cluster.reserve(ranks)
        rollout = RolloutClient(cluster, BatchActor, config)
        trainer = start_trainer(config, allocation, cluster)
        trainer.groups.wait_started()
        facts, schedule = wait_facts(config, rollout)
        context = context.fitted_to(schedule)
        _load(config, trainer, context, schedule)
        weights = Publisher(
            lambda folder: trainer.actor.group.save_hf(PUSHED, str(folder), config.model_folder),
            VersionFolder(config.weights_folder),
            interval=config.synchronizer.interval,
            on_request=config.synchronizer.on_request,
            last_step=schedule.total_steps,
        )
        _train(config, context, trainer, rollout, weights, schedule, facts)
        rollout.close()


JOBS: Mapping[Job, Callable[[PPOMATHConfig, RunContext], None]] = {
    "both": both,
    "train": train,
    "explore": explore,
    "bench": bench,
    "serve": serve,
}
"""What each job runs."""


def load_beside(
    generators: GeneratorPool,
    weights: WeightPush,
    config: PPOMATHConfig,
    trainer: TrainerSide,
    context: RunContext,
    schedule: Schedule,
    *,
    takes_turns: bool,
) -> None:
    """Load the models while generators start, and connect both. `takes_turns`: they share GPUs."""
    if takes_turns:  # the servers size their cache first, then the engines find room
        generators.wait_started()
        weights.offload_generators()
    _load(config, trainer, context, schedule)
    generators.wait_started()
    weights.connect()


def _load(config: PPOMATHConfig, trainer: TrainerSide, context: RunContext, schedule: Schedule) -> None:
    """Load the models, and the checkpoint if there is one."""
    checkpoint = context.start.checkpoint
    context.screen.begin("loading the models")
    build_ppo_engines(config, trainer, total_updates=schedule.total_steps * config.num_minibatches)
    if checkpoint is not None:
        trainer.trained.load(checkpoint)
        logger.info("Recovered from %s: %d steps are done.", checkpoint, context.start.state.step)
    if config.recovers:  # not before: loading takes as much memory
        trainer.trained.prepare_saves()


def _train(
    config: PPOMATHConfig,
    context: RunContext,
    workers: TrainerSide,
    rollout: RolloutClient,
    weights: WeightUpdates,
    schedule: Schedule,
    facts: DataFacts,
    generators: GeneratorPool | None = None,
) -> None:
    """Connect loop, monitor and periodic actions, give the generators their first weights, and train. `generators`:
    those of this job."""
    forget_modules()
    sample_steps = config.samples.shown_every
    context.screen.begin("sampling and training the first step")
    monitor = context.monitor(schedule, consumed=True, sample_steps=sample_steps)
    algorithm, start, timer = build_algorithm(config), context.start, context.timer()
    logger.info("Algorithm: %s; minibatches never split a %s.", config.algorithm_name, algorithm.unit)
    trainer = PPOTrainer(
        actor=workers.actor,
        critic=workers.critic,
        reference=workers.reference,
        rollout=rollout,
        weights=weights,
        memory=context.memory,
        algorithm=algorithm,
        sample_reuse=config.ppo.sample_reuse,
        num_minibatches=config.num_minibatches,
        temperature=config.ppo.gen.temperature,
        schedule=schedule,
        monitor=monitor,
        timer=timer,
        skipped_updates=context.skipped_updates(),
        saved_steps=_saved_steps(config, context.paths.logs / "batches"),
        mean_batch_tokens=facts.mean_prompt_tokens * schedule.batch_size,
    )

    evaluations = Evaluations(
        rollout,
        generators if config.evaluation.beside else None,
        report=monitor.evaluation,
        is_done=has_ended,
        meanwhile=weights.sync_rejoined,
    )
    evaluates = config.evaluates and config.job != "train"
    periodic = context.periodic(
        schedule,
        engines=workers.trained,
        tokenizer_from=config.model_folder,
        evaluations=evaluations if evaluates else None,
        rollout_state=rollout.state_dict,
        driver_state=lambda: (monitor.elapsed_seconds, {**trainer.state, "evaluating": evaluations.step}),
    )
    is_due = start.checkpoint is None and config.exp_ctrl.eval_at_start
    continues = start.checkpoint is not None and start.state.extra.get("evaluating") == start.state.step
    with monitor:
        weights.push(start.state.version)
        if evaluates and is_due:
            with timer("evaluate"):
                evaluations.begin(0)
        rollout.call(RolloutActor.begin, start.state.version, start.rollout_state, context.ignores_changes)
        if evaluates and continues:
            evaluations.begin(start.state.step)
        with context.recover, periodic.saved_at_interrupt():
            trainer.run(start.state, periodic)


def _saved_steps(config: PPOMATHConfig, folder: Path) -> SavedSteps | None:
    every = config.monitor.save_batches
    name, settings = config.algorithm_case
    return SavedSteps(folder=folder, every=every, name=name, settings=settings) if every else None
