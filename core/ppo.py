"""Puts a PPO run together: cluster, trainer ranks, generators, rollout side; then core/trainer.py takes over."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from core.config_allocation import resolve_allocation
from core.housekeeping import Actions, Housekeeping
from core.launch import Cluster
from core.monitor import Monitor
from core.recover import RecoverStore, RunIdentity
from core.run import Start, find_start, metric_sinks, run_with_retries, save_model
from core.schedule import Schedule
from core.trainer import PPOTrainer, settings_from_config
from core.workers import (
    PPOWorkers,
    build_ppo_engines,
    connect_senders,
    make_push,
    start_ppo_workers,
    uses_gpus,
)

if TYPE_CHECKING:
    from rich.console import Console

    from core.config import PPOMATHConfig
    from core.paths import RunPaths
    from core.push import WeightPush

logger = logging.getLogger(__name__)


def run_ppo(config: PPOMATHConfig, paths: RunPaths, console: Console) -> int:
    """Train; returns the exit code."""
    # What the driver computes takes a millisecond; more threads would wait for the cores that the workers use.
    torch.set_num_threads(1)
    return run_with_retries(config, lambda resume: _attempt(config, paths, console, resume=resume))


def _attempt(config: PPOMATHConfig, paths: RunPaths, console: Console, *, resume: bool) -> None:
    """One life of all processes, from the beginning or from the newest recover checkpoint."""
    allocation = resolve_allocation(config)
    recover = RecoverStore(
        paths.recover,
        RunIdentity(
            train_bs_n_seqs=config.dataset.train_bs_n_seqs, group_size=config.group_size, n_nodes=config.n_nodes
        ),
    )
    start = find_start(recover, config.recover_mode, paths.recover, resume=resume)
    patience = config.launch.startup_timeout_seconds
    with Cluster(
        ray_address=config.launch.ray_address,
        num_actors=sum(len(role.slots) for role in allocation.roles.values()) + 1,
        startup_timeout_seconds=patience,
        log_folder=paths.logs,
    ) as cluster:
        cluster.reserve(allocation, gpus=uses_gpus(allocation, config.actor.sglang))
        workers = start_ppo_workers(config, allocation, cluster)
        workers.groups.wait_started(patience)
        facts = workers.rollout.wait_started(patience)
        schedule = Schedule.from_control(
            config.exp_ctrl, num_prompts=facts["num_prompts"], batch_size=config.dataset.train_bs_n_seqs
        )
        weights = make_push(config, workers)
        if workers.colocated:  # the servers size their cache first, then the engines find room
            workers.generators.wait_started(patience)
            weights.make_room()
        build_ppo_engines(config, workers, total_updates=schedule.total_steps * config.ppo.ppo_n_minibatches)
        workers.generators.wait_started(patience)
        connect_senders(config, allocation, workers, paths.checkpoints / "push")
        if start.checkpoint is not None:
            workers.trained.load(start.checkpoint)
            logger.info("Recovered from %s: %d steps are done.", start.checkpoint, start.state.step)
        with Monitor(
            console=console,
            sinks=metric_sinks(config, paths),
            total_steps=schedule.total_steps,
            done_steps=start.state.step,
            elapsed=start.state.elapsed_seconds,
        ) as monitor:
            _train(config, paths, workers, weights, schedule, monitor, recover, start, facts)
        workers.rollout.close()
        workers.close_senders()
        workers.generators.close()


def _train(
    config: PPOMATHConfig,
    paths: RunPaths,
    workers: PPOWorkers,
    weights: WeightPush,
    schedule: Schedule,
    monitor: Monitor,
    recover: RecoverStore,
    start: Start,
    facts: dict[str, Any],
) -> None:
    """Wire loop and housekeeping, give the generators their first weights, and go."""
    trainer = PPOTrainer(
        actor=workers.actor,
        critic=workers.critic,
        reference=workers.reference,
        rollout=workers.rollout,
        weights=weights,
        settings=settings_from_config(config),
        schedule=schedule,
        monitor=monitor,
        mean_batch_tokens=facts["mean_prompt_tokens"] * config.dataset.train_bs_n_seqs,
    )

    def evaluate(step: int) -> None:
        result = {f"eval/{name}": value for name, value in workers.rollout.evaluate().items()}
        monitor.rpc("evaluate", result)
        monitor.write(step, result)

    evaluates = config.evaluation.path is not None
    housekeeping = Housekeeping(
        schedule=schedule,
        control=config.exp_ctrl,
        actions=Actions(
            evaluate=evaluate if evaluates else None,
            save_model=lambda name: save_model(workers.trained, paths.checkpoints, name, config.actor.path),
            save_engines=workers.trained.save,
            rollout_state=workers.rollout.state_dict,
            driver_state=lambda: (monitor.elapsed_seconds, trainer.state),
        ),
        recover=None if config.recover_mode == "disabled" else recover,
    )
    weights.push(start.state.version)
    if evaluates and start.checkpoint is None:
        evaluate(0)
    workers.rollout.begin(start.state.version, start.rollout_state)
    trainer.run(start.state, housekeeping.after_step)
