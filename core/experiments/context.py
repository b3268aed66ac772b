"""What every experiment opens in the same way: where to begin, memory limits, cluster, monitor, saved models and
periodic actions.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from core.checks.resumption import changed_settings
from core.config.experiments import ExperimentConfig, PPOMATHConfig
from core.config.parsing.problems import ConfigError
from core.launch.cluster import Cluster
from core.monitoring.metrics import Journal, SkippedUpdates
from core.monitoring.monitor import MetricSink, Monitor, StepTimer, TensorBoardSink
from core.monitoring.screen import Screen
from core.monitoring.trackers import BackgroundTracker, MLflowSink, TrackedRuns, Tracker, TrackerError, WandbSink
from core.placement import joined_cluster
from core.runs.checkpoints import DamagedError, ends_too_early, near_trials, too_few_steps, verify
from core.runs.paths import RunPaths
from core.runs.record import saved_models
from core.train.periodic import Evaluations, PeriodicActions, SerialEvaluations, schedule_from_control
from core.train.recover import MemoryLimits, RecoverStore, RunState, Start
from rollout.experience import Schedule
from tracing import record_spans

if TYPE_CHECKING:
    from core.experiments.workers import TrainedEngines
    from core.explore.data import DataFacts
    from core.launch.rollout_client import RolloutClient
    from core.processes.supervise import Attempt

logger = logging.getLogger(__name__)


_BEGINNING = RunState(step=0, version=0, elapsed_seconds=0.0, extra={})


def find_start(recover: RecoverStore, config: ExperimentConfig, folder: Path) -> Start:
    """Return the newest valid recover checkpoint, or the beginning. Raises ValueError when recover_mode=resume finds
    none, or one that these settings cannot follow."""
    checkpoint = recover.newest() if config.recovers else None
    if checkpoint is None and config.recovers and config.earlier_checkpoint is not None:
        checkpoint = config.earlier_checkpoint
        try:
            verify(checkpoint)
        except (DamagedError, OSError) as error:
            raise ValueError(
                f"resume_from={checkpoint}: no recover checkpoint (globalstepN) is there: {error}"
            ) from None
    if checkpoint is None:
        if config.recovers:
            missing = f"{config.recover_setting}: there is no valid recover checkpoint in {folder}"
            missing += near_trials(folder)
            if config.must_recover:
                raise ValueError(
                    f"{missing}; check experiment_name and trial_name, or start a new run with recover_mode=auto"
                )
            logger.info("%s; training starts from the beginning.", missing)
        return Start(state=_BEGINNING, rollout_state=None, checkpoint=None)
    if not config.recover_ignore_changes and (problems := [*changed_settings(config, checkpoint)]):
        raise ConfigError(problems)
    return recover.load(checkpoint)


def fit_to_schedule(start: Start, schedule: Schedule) -> Start:
    """Return the same number of prompts done, in steps of another batch size: at most one batch of them is trained
    again."""
    if start.identity is None or start.identity.train_bs_n_seqs == schedule.batch_size:
        return start
    done = replace(schedule, batch_size=start.identity.train_bs_n_seqs).first_prompt_of(start.state.step)
    step = schedule.step_of(done)
    logger.warning(
        "%s: %d prompts were trained in %d steps, which is step %d now.", ", ".join(start.changes), done,
        start.state.step, step,
    )  # fmt: skip
    return replace(start, state=replace(start.state, step=step, version=step))


def check_ends_later(start: Start, schedule: Schedule) -> None:
    """Raise ValueError where the run would end before the step that it continues from."""
    step, total = start.state.step, schedule.total_steps
    if start.checkpoint is None or step <= total:
        return
    if total == schedule.total_steps_limit:
        raise ValueError(f"exp_ctrl.total_train_steps: {too_few_steps(total, step, start.checkpoint)}")
    end = f"{schedule.total_epochs} epochs of {schedule.steps_per_epoch} steps"
    message = ends_too_early(end, step, start.checkpoint, way_out="Raise it")
    raise ValueError(f"exp_ctrl.total_train_epochs: {message}")


def wait_facts(config: PPOMATHConfig, rollout: RolloutClient) -> tuple[DataFacts, Schedule]:
    """Return facts about the prompts, and the schedule that follows, when the rollout process is up."""
    facts = rollout.wait_started()
    for left_out in facts.left_out:
        left_out.report(logger)
    logger.info("%s", facts.first_prompt)
    return facts, schedule_from_control(config.exp_ctrl, num_prompts=facts.num_prompts, batch_size=config.batch_size)


def has_model(engines: TrainedEngines, checkpoints: Path, name: str) -> bool:
    """Return whether every trained engine has the Hugging Face folder `{checkpoints}/{engine}/{name}`."""
    folders = [checkpoints / engine.name for engine in engines]
    return all(folder / name in saved_models(folder) for folder in folders)


def save_model(engines: TrainedEngines, checkpoints: Path, name: str, tokenizer_from: str, *, keep: int | None) -> None:
    """Write `{checkpoints}/{engine}/{name}`: a Hugging Face folder for every trained engine. Then delete all but the
    newest `keep` of each."""
    for engine in engines:
        target = checkpoints / engine.name / name
        engine.group.save_hf(engine.name, str(target), tokenizer_from)
        logger.info("Saved %s to %s", engine.name, target)
        for old in saved_models(checkpoints / engine.name)[: -keep if keep else 0]:
            shutil.rmtree(old)
            logger.info("Deleted %s (exp_ctrl.save_keep=%d)", old, keep)


def rows_that_stay(start: Start) -> int:
    """Return the last step whose rows a run that begins at `start` keeps in its logs; -1: none, not even those of the
    evaluation before the first step. What an earlier run wrote was set aside (core/runs/paths.py)."""
    return -1 if start.checkpoint is None else start.state.step


def open_trackers(config: ExperimentConfig, paths: RunPaths) -> list[MetricSink]:
    """Return the experiment trackers of this run, those of its earlier attempts included.

    Call it before any process is started. Raises TrackerError where one cannot be used. One that this trial used
    before only costs a warning: an attempt does not fail for it."""
    runs = TrackedRuns(paths.logs / "tracked_runs.json")
    opened: list[MetricSink] = []
    for service, open_one in _trackers(config, paths, runs).items():
        began = runs.get(service) is not None
        try:
            opened.append(BackgroundTracker(open_one()))
        except TrackerError as error:
            if not began:
                raise
            logger.warning("%s. Training continues without it; if the run was deleted, remove %s.", error, runs.file)
    return opened


def _trackers(config: ExperimentConfig, paths: RunPaths, runs: TrackedRuns) -> dict[str, Callable[[], Tracker]]:
    trackers: dict[str, Callable[[], Tracker]] = {}
    if config.wandb.mode != "disabled":
        trackers["wandb"] = partial(
            WandbSink,
            runs=runs,
            mode=config.wandb.mode,
            entity=config.wandb.entity,
            project=config.wandb.project or paths.experiment,
            name=config.wandb.name or paths.trial,
            group=config.wandb.group,
            tags=config.wandb.tags,
            config=config.masked().model_dump(mode="json"),
            folder=paths.logs,
        )
    if config.monitor.mlflow_uri is not None:
        trackers["mlflow"] = partial(
            MLflowSink, runs=runs, uri=config.monitor.mlflow_uri, experiment=paths.experiment, name=paths.trial
        )
    return trackers


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

    def skipped_updates(self) -> SkippedUpdates:
        """Return what counts the steps in a row whose updates were skipped."""
        return SkippedUpdates(self.config.exp_ctrl.max_skipped_steps)

    @property
    def ignores_changes(self) -> bool:
        """True if a checkpoint of other data or settings may be continued."""
        return self.config.recover_ignore_changes

    @classmethod
    def open(cls, config: ExperimentConfig, paths: RunPaths, screen: Screen, attempt: Attempt) -> RunContext:
        """Find where the attempt begins, and open the experiment trackers and the timeline of the driver. Raises
        ValueError as find_start, and TrackerError."""
        record_spans("driver", paths.logs, limit_mib=config.monitor.timeline_mib)
        recover = RecoverStore(
            paths.recover, config.identity, keep=config.recover_keep, timeout_seconds=config.deadlines.call_seconds
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
        keep, logs = rows_that_stay(self.start), self.paths.logs
        sinks: list[MetricSink] = [Journal(logs / "metrics.jsonl", continue_after=keep)]
        if self.config.monitor.tensorboard:
            sinks.append(TensorBoardSink(logs / "tensorboard", continue_after=keep))
        return Monitor(
            screen=self.screen,
            sinks=[*sinks, *self.trackers],
            consumed=Journal(logs / "consumed.jsonl", continue_after=keep) if consumed else None,
            schedule=schedule,
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
        """Return what is due after steps. `tokenizer_from`: folder of the tokenizer that is saved with
        `engines`."""
        config, checkpoints = self.config, self.paths.checkpoints

        def save(name: str) -> None:
            save_model(engines, checkpoints, name, tokenizer_from, keep=config.exp_ctrl.save_keep)

        return PeriodicActions(
            schedule=schedule,
            control=config.exp_ctrl,
            report_step=lambda step: self.attempt.report(step=step),
            evaluations=evaluations,
            save_model=save,
            has_model=partial(has_model, engines, checkpoints),
            begin_save=engines.begin_save,
            rollout_state=rollout_state,
            driver_state=driver_state,
            recover=self.recover if config.recovers else None,
            start=self.start.state,
            interrupt_seconds=config.deadlines.interrupt_seconds,
        )
