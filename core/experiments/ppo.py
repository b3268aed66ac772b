"""Puts a PPO run together: cluster, trainer ranks, generators, rollout side; then core/trainer.py takes over."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from core.algorithms.saved_steps import SavedSteps
from core.config.algorithm import build_algorithm, case_settings
from core.config.allocation import resolve_allocation
from core.config.ray_address import joined_cluster
from core.experiments.common import (
    Start,
    find_start,
    fit_to_schedule,
    metric_sinks,
    open_trackers,
    rows_that_stay,
    save_model,
)
from core.experiments.workers import (
    PPOWorkers,
    build_ppo_engines,
    connect_senders,
    make_push,
    start_ppo_workers,
)
from core.launch.cluster import Cluster
from core.monitoring.journal import Journal
from core.monitoring.monitor import Monitor, StepTimer
from core.monitoring.skipped_updates import SkippedUpdates
from core.periodic import Actions, PeriodicActions
from core.processes.stacks import forget_modules
from core.recovery.memory import MemoryLimits
from core.recovery.recover import RecoverStore
from core.schedule import schedule_from_control
from core.trainer import PPOTrainer
from rollout.experience import Schedule
from tracing import record_spans

if TYPE_CHECKING:
    from rich.console import Console

    from core.config.experiments import PPOMATHConfig
    from core.paths import RunPaths
    from core.processes.supervise import Attempt
    from core.weight_sync.base import RunPush

logger = logging.getLogger(__name__)


def run_ppo(config: PPOMATHConfig, paths: RunPaths, console: Console, attempt: Attempt) -> None:
    """Train, in one life of all processes, from the beginning or from the newest recover checkpoint."""
    # What the driver computes takes a millisecond; more threads would wait for the cores that the workers use.
    torch.set_num_threads(1)
    record_spans("driver", paths.logs, limit_mib=config.monitor.timeline_mib)
    allocation = resolve_allocation(config)
    recover = RecoverStore(
        paths.recover,
        config.run_identity,
        keep=config.recover_keep,
        timeout_seconds=config.deadlines.call_seconds,
    )
    start = find_start(recover, config, paths.recover)
    attempt.tell(began=start.state.step, step=start.state.step)
    trackers = open_trackers(config, paths)
    patience = config.launch.startup_timeout_seconds
    with Cluster(
        joined=joined_cluster(config),
        envs=config.external_configs.envs,
        num_actors=sum(len(role.slots) for role in allocation.roles.values()) + 1,
        startup_timeout_seconds=patience,
        deadlines=config.deadlines,
        log_folder=paths.logs,
    ) as cluster:
        cluster.reserve(allocation)
        memory = MemoryLimits(attempt.memory, tell=lambda learnt: attempt.tell(memory=learnt))
        memory.load_state_dict(start.state.extra.get("memory", {}))  # type: ignore[arg-type]
        workers = start_ppo_workers(config, allocation, cluster, memory)
        workers.groups.wait_started(patience)
        facts = workers.rollout.wait_started(patience)
        logger.info("%s", facts["first_prompt"])
        schedule = schedule_from_control(
            config.exp_ctrl, num_prompts=facts["num_prompts"], batch_size=config.dataset.train_bs_n_seqs
        )
        start = fit_to_schedule(start, schedule)
        attempt.tell(began=start.state.step, step=start.state.step)
        push_folder = paths.checkpoints / "push"
        weights = make_push(config, allocation, workers, push_folder)
        if workers.colocated:  # the servers size their cache first, then the engines find room
            workers.generators.wait_started(patience)
            weights.offload_generators()
        build_ppo_engines(config, workers, total_updates=schedule.total_steps * config.ppo.ppo_n_minibatches)
        saves = config.recovers
        if saves and start.checkpoint is None:
            workers.trained.prepare_saves()
        workers.generators.wait_started(patience)
        connect_senders(config, allocation, workers, push_folder)
        if start.checkpoint is not None:
            workers.trained.load(start.checkpoint)
            if saves:  # not before: loading takes as much
                workers.trained.prepare_saves()
            logger.info("Recovered from %s: %d steps are done.", start.checkpoint, start.state.step)
        forget_modules()
        with Monitor(
            console=console,
            sinks=[*metric_sinks(config, paths, continue_after=rows_that_stay(start)), *trackers],
            consumed=Journal(paths.logs / "consumed.jsonl", continue_after=rows_that_stay(start)),
            total_steps=schedule.total_steps,
            done_steps=start.state.step,
            elapsed=start.state.elapsed_seconds,
            sample_steps=config.samples.log_freq_steps if config.samples.share else None,
        ) as monitor:
            _train(config, paths, workers, weights, memory, schedule, monitor, recover, start, facts, attempt)
        workers.rollout.close()
        workers.close_senders()
        workers.generators.close()


def _train(
    config: PPOMATHConfig,
    paths: RunPaths,
    workers: PPOWorkers,
    weights: RunPush,
    memory: MemoryLimits,
    schedule: Schedule,
    monitor: Monitor,
    recover: RecoverStore,
    start: Start,
    facts: dict[str, Any],
    attempt: Attempt,
) -> None:
    """Connect loop and periodic actions, give the generators their first weights, and run."""
    algorithm = build_algorithm(config)
    if config.monitor.save_batches:
        algorithm = SavedSteps(
            algorithm, folder=paths.logs / "batches", every=config.monitor.save_batches, step=start.state.step,
            name=config.algorithm.name, settings=case_settings(config),
        )  # fmt: skip
    logger.info("Algorithm: %s; minibatches never split a %s.", config.algorithm_name, algorithm.unit)
    trainer = PPOTrainer(
        actor=workers.actor,
        critic=workers.critic,
        reference=workers.reference,
        rollout=workers.rollout,
        weights=weights,
        memory=memory,
        algorithm=algorithm,
        actor_sample_reuse=config.ppo.actor_sample_reuse,
        critic_sample_reuse=config.ppo.critic_sample_reuse,
        num_minibatches=config.ppo.ppo_n_minibatches,
        temperature=config.ppo.gen.temperature,
        schedule=schedule,
        monitor=monitor,
        timer=StepTimer(lambda phase: attempt.tell(phase=phase)),
        skipped_updates=SkippedUpdates(config.exp_ctrl.max_skipped_steps),
        mean_batch_tokens=facts["mean_prompt_tokens"] * config.dataset.train_bs_n_seqs,
    )

    def evaluate(step: int) -> None:
        result = {f"eval/{name}": value for name, value in workers.rollout.evaluate(weights.sync_rejoined).items()}
        monitor.rpc("evaluate", result)
        monitor.write(step, result)

    evaluates = bool(config.evaluation.paths)
    periodic = PeriodicActions(
        schedule=schedule,
        control=config.exp_ctrl,
        actions=Actions(
            tell_step=lambda step: attempt.tell(step=step),
            evaluate=evaluate if evaluates else None,
            save_model=lambda name: save_model(
                workers.trained, paths.checkpoints, name, config.actor.path, keep=config.exp_ctrl.save_keep
            ),
            begin_save=workers.trained.begin_save,
            rollout_state=workers.rollout.state_dict,
            driver_state=lambda: (monitor.elapsed_seconds, trainer.state),
        ),
        recover=recover if config.recovers else None,
        start=start.state,
        interrupt_seconds=config.deadlines.interrupt_seconds,
    )
    weights.push(start.state.version)
    if evaluates and start.checkpoint is None and config.exp_ctrl.eval_at_start:
        evaluate(0)
    workers.rollout.begin(start.state.version, start.rollout_state, ignore_changes=config.recover_ignore_changes)
    with recover, periodic.saved_at_interrupt():
        trainer.run(start.state, periodic)
