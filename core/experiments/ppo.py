"""Puts a PPO run together: cluster, trainer ranks, generators, rollout side; then core/trainer.py takes over."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from core.algorithms.build import build_algorithm
from core.algorithms.saved_steps import SavedSteps
from core.experiments.context import RunContext
from core.experiments.workers import (
    PPOWorkers,
    build_ppo_engines,
    make_push,
    start_ppo_workers,
)
from core.monitoring.skipped_updates import SkippedUpdates
from core.placement.allocation import resolve_allocation
from core.processes.stacks import forget_modules
from core.schedule import schedule_from_control
from core.trainer import PPOTrainer

if TYPE_CHECKING:
    from allocation import Allocation
    from core.algorithms.base import Algorithm
    from core.config.experiments import PPOMATHConfig
    from core.monitoring.monitor import Monitor
    from core.monitoring.screen import Screen
    from core.processes.supervise import Attempt
    from core.rollout_settings import DataFacts
    from core.runs.paths import RunPaths
    from core.weight_sync.push import WeightPush
    from rollout.experience import Schedule

logger = logging.getLogger(__name__)


def run_ppo(config: PPOMATHConfig, paths: RunPaths, screen: Screen, attempt: Attempt) -> None:
    """Run one attempt: train from the beginning, or from the newest recover checkpoint."""
    # What the driver computes takes a millisecond; more threads would wait for the cores that the workers use.
    torch.set_num_threads(1)
    allocation = resolve_allocation(config)
    context = RunContext.open(config, paths, screen, attempt)
    patience = config.launch.startup_timeout_seconds
    num_actors = sum(len(role.slots) for role in allocation.roles.values()) + 1
    screen.begin("starting Ray")
    with context.cluster(num_actors=num_actors) as cluster:
        screen.begin("starting the processes")
        cluster.reserve(allocation)
        workers = start_ppo_workers(config, allocation, cluster, context.memory)
        workers.groups.wait_started(patience)
        facts = workers.rollout.wait_started(patience)
        for left_out in facts.left_out:
            left_out.report(logger)
        logger.info("%s", facts.first_prompt)
        schedule = schedule_from_control(
            config.exp_ctrl, num_prompts=facts.num_prompts, batch_size=config.dataset.train_bs_n_seqs
        )
        context = context.fitted_to(schedule)
        screen.begin("loading the models")
        weights = _load(config, allocation, workers, context, total_steps=schedule.total_steps)
        forget_modules()
        sample_steps = config.samples.log_freq_steps if config.samples.share else None
        screen.begin("sampling and training the first step")
        with context.monitor(schedule, consumed=True, sample_steps=sample_steps) as monitor:
            _train(config, context, workers, weights, schedule, monitor, facts)
        workers.rollout.close()
        weights.close()
        workers.generators.close()


def _load(
    config: PPOMATHConfig, allocation: Allocation, workers: PPOWorkers, context: RunContext, *, total_steps: int
) -> WeightPush:
    """Load the models, connect trainer and generators, and load the checkpoint if there is one."""
    checkpoint, patience = context.start.checkpoint, config.launch.startup_timeout_seconds
    weights = make_push(config, allocation, workers, context.paths.checkpoints / "push")
    if workers.colocated:  # the servers size their cache first, then the engines find room
        workers.generators.wait_started(patience)
        weights.offload_generators()
    build_ppo_engines(config, workers, total_updates=total_steps * config.ppo.ppo_n_minibatches)
    if checkpoint is not None:  # while servers start, which takes as long
        workers.trained.load(checkpoint)
        logger.info("Recovered from %s: %d steps are done.", checkpoint, context.start.state.step)
    if config.recovers:  # not before: loading takes as much memory
        workers.trained.prepare_saves()
    workers.generators.wait_started(patience)
    weights.connect()
    return weights


def _train(
    config: PPOMATHConfig,
    context: RunContext,
    workers: PPOWorkers,
    weights: WeightPush,
    schedule: Schedule,
    monitor: Monitor,
    facts: DataFacts,
) -> None:
    """Connect loop and periodic actions, give the generators their first weights, and run."""
    algorithm, start, timer = _algorithm(config, context), context.start, context.timer()
    trainer = PPOTrainer(
        actor=workers.actor,
        critic=workers.critic,
        reference=workers.reference,
        rollout=workers.rollout,
        weights=weights,
        memory=context.memory,
        algorithm=algorithm,
        actor_sample_reuse=config.ppo.actor_sample_reuse,
        critic_sample_reuse=config.ppo.critic_sample_reuse,
        num_minibatches=config.ppo.ppo_n_minibatches,
        temperature=config.ppo.gen.temperature,
        schedule=schedule,
        monitor=monitor,
        timer=timer,
        skipped_updates=SkippedUpdates(config.exp_ctrl.max_skipped_steps),
        mean_batch_tokens=facts.mean_prompt_tokens * config.dataset.train_bs_n_seqs,
    )

    def evaluate(step: int) -> None:
        monitor.evaluation(step, workers.rollout.evaluate(weights.sync_rejoined))

    evaluates = bool(config.evaluation.paths)
    periodic = context.periodic(
        schedule,
        engines=workers.trained,
        tokenizer_from=config.actor.path,
        evaluate=evaluate if evaluates else None,
        rollout_state=workers.rollout.state_dict,
        driver_state=lambda: (monitor.elapsed_seconds, trainer.state),
    )
    weights.push(start.state.version)
    if evaluates and start.checkpoint is None and config.exp_ctrl.eval_at_start:
        with timer("evaluate"):
            evaluate(0)
    workers.rollout.begin(start.state.version, start.rollout_state, ignore_changes=config.recover_ignore_changes)
    with context.recover, periodic.saved_at_interrupt():
        trainer.run(start.state, periodic)


def _algorithm(config: PPOMATHConfig, context: RunContext) -> Algorithm:
    """Return the algorithm of the run, which saves batches if monitor.save_batches is set."""
    algorithm = build_algorithm(config)
    logger.info("Algorithm: %s; minibatches never split a %s.", config.algorithm_name, algorithm.unit)
    if not config.monitor.save_batches:
        return algorithm
    return SavedSteps(
        algorithm, folder=context.paths.logs / "batches", every=config.monitor.save_batches,
        step=context.start.state.step, name=config.algorithm.name, settings=case_settings(config),
    )  # fmt: skip


def case_settings(config: PPOMATHConfig) -> dict[str, object]:
    """Return the settings of this run as those of a case of `python -m tools.loss`, without the entropy bonus: no
    entropy is saved."""
    algorithm = config.algorithm.model_dump(exclude={"name"}) | {"entropy_coeff": 0.0}
    ppo = {f"ppo.{key}": value for key, value in config.ppo.model_dump(exclude={"gen"}).items()}
    return {
        **algorithm, **ppo,
        "ppo.gen.max_new_tokens": config.ppo.gen.max_new_tokens,
        "staleness.max_staleness": config.staleness.max_staleness,
        "group_adv_norm": config.group_adv_norm,
    }  # fmt: skip
