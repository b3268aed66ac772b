"""What every experiment opens in the same way: checkpoints, memory limits, cluster, monitor and periodic actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from core.experiments.common import (
    Start,
    check_ends_later,
    find_start,
    fit_to_schedule,
    has_model,
    metric_sinks,
    open_trackers,
    rows_that_stay,
    save_model,
)
from core.launch.cluster import Cluster
from core.monitoring.metrics import Journal
from core.monitoring.monitor import MetricSink, Monitor, StepTimer
from core.placement.ray_address import joined_cluster
from core.recovery.memory import MemoryLimits
from core.recovery.recover import RecoverStore
from core.runs.checkpoints import RunIdentity
from core.train.periodic import Actions, Evaluations, PeriodicActions, SerialEvaluations
from tracing import record_spans

if TYPE_CHECKING:
    from core.config.experiments import ExperimentConfig
    from core.experiments.workers import TrainedEngines
    from core.monitoring.screen import Screen
    from core.processes.supervise import Attempt
    from core.runs.paths import RunPaths
    from rollout.experience import Schedule


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """One attempt before its processes start: where it begins, and where it reports."""

    config: ExperimentConfig
    paths: RunPaths
    screen: Screen
    attempt: Attempt
    recover: RecoverStore
    start: Start
    trackers: list[MetricSink]
    memory: MemoryLimits

    @classmethod
    def open(cls, config: ExperimentConfig, paths: RunPaths, screen: Screen, attempt: Attempt) -> RunContext:
        """Find where the attempt begins, and open the experiment trackers and the timeline of the driver. Raises
        ValueError as find_start, and TrackerError."""
        record_spans("driver", paths.logs, limit_mib=config.monitor.timeline_mib)
        recover = RecoverStore(
            paths.recover,
            RunIdentity(**config.identity),
            keep=config.recover_keep,
            timeout_seconds=config.deadlines.call_seconds,
        )
        start = find_start(recover, config, paths.recover)
        attempt.report(began=start.state.step, step=start.state.step)
        memory = MemoryLimits(attempt.memory, on_lowered=lambda limits: attempt.report(memory=limits))
        memory.load_state_dict(start.state.extra.get("memory", {}))  # type: ignore[arg-type]
        return cls(
            config=config, paths=paths, screen=screen, attempt=attempt, recover=recover, start=start,
            trackers=open_trackers(config, paths), memory=memory,
        )  # fmt: skip

    def fitted_to(self, schedule: Schedule) -> RunContext:
        """Return this attempt with its start in the steps of `schedule`; see fit_to_schedule. Raises ValueError where
        that is beyond its end."""
        start = fit_to_schedule(self.start, schedule)
        check_ends_later(start, schedule)
        self.attempt.report(began=start.state.step, step=start.state.step)
        return replace(self, start=start)

    def cluster(self, *, num_actors: int) -> Cluster:
        """Return the Ray cluster of the attempt, to be entered."""
        config = self.config
        return Cluster(
            joined=joined_cluster(config),
            envs=config.external_configs.envs,
            num_actors=num_actors,
            startup_timeout_seconds=config.launch.startup_timeout_seconds,
            deadlines=config.deadlines,
            log_folder=self.paths.logs,
            before_end=[tracker.close for tracker in self.trackers],
        )

    def monitor(self, schedule: Schedule, *, consumed: bool = False, sample_steps: int | None = None) -> Monitor:
        """Return the monitor, to be entered. `consumed`: record the prompts of each step. `sample_steps`: steps between
        samples in the log; None: none."""
        keep = rows_that_stay(self.start)
        return Monitor(
            screen=self.screen,
            sinks=[*metric_sinks(self.config, self.paths, continue_after=keep), *self.trackers],
            consumed=Journal(self.paths.logs / "consumed.jsonl", continue_after=keep) if consumed else None,
            total_steps=schedule.total_steps,
            done_steps=self.start.state.step,
            elapsed=self.start.state.elapsed_seconds,
            sample_steps=sample_steps,
        )

    def timer(self) -> StepTimer:
        """Return a timer that reports each phase to the process that supervises the attempt."""
        return StepTimer(lambda phase: self.attempt.report(phase=phase))

    def periodic(
        self,
        schedule: Schedule,
        *,
        engines: TrainedEngines,
        tokenizer_from: str,
        evaluations: Evaluations | SerialEvaluations | None,
        rollout_state: Callable[[], object],
        driver_state: Callable[[], tuple[float, dict[str, object]]],
    ) -> PeriodicActions:
        """Return what is due after steps; see Actions. `tokenizer_from`: folder of the tokenizer that is saved with
        `engines`."""
        config, checkpoints = self.config, self.paths.checkpoints

        def save(name: str) -> None:
            save_model(engines, checkpoints, name, tokenizer_from, keep=config.exp_ctrl.save_keep)

        return PeriodicActions(
            schedule=schedule,
            control=config.exp_ctrl,
            actions=Actions(
                report_step=lambda step: self.attempt.report(step=step),
                evaluations=evaluations,
                save_model=save,
                has_model=partial(has_model, engines, checkpoints),
                begin_save=engines.begin_save,
                rollout_state=rollout_state,
                driver_state=driver_state,
            ),
            recover=self.recover if config.recovers else None,
            start=self.start.state,
            interrupt_seconds=config.deadlines.interrupt_seconds,
        )
