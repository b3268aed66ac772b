"""What both experiments share around their loops: restarts, where to begin, where metrics go, saved models."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from core.errors import LaunchError
from core.monitor import JsonLinesSink, MetricSink, MLflowSink, TensorBoardSink, WandbSink
from core.recover import RecoverStore, RunState

if TYPE_CHECKING:
    from core.config import ExperimentConfig
    from core.paths import RunPaths
    from core.workers import TrainedEngines

logger = logging.getLogger(__name__)

_BEGINNING = RunState(step=0, version=0, elapsed_seconds=0.0, extra={})


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where an attempt begins: a recover checkpoint, or the beginning."""

    state: RunState
    rollout_state: object | None
    checkpoint: Path | None


def run_with_retries(config: ExperimentConfig, attempt: Callable[[bool], None]) -> int:
    """Call `attempt(resume)`; returns the exit code 0. With recover_mode=auto a lost worker costs another attempt from
    the last recover checkpoint, at most `recover_retries` times; bad input never does. The last failure is raised.
    """
    retries = config.recover_retries if config.recover_mode == "auto" else 0
    for number in range(retries + 1):
        try:
            attempt(number > 0 or config.recover_mode != "disabled")
            break
        except (LaunchError, MemoryError) as e:
            if number == retries:
                raise
            logger.error("%s. Restarting from the last recover checkpoint (%d of %d).", e, number + 1, retries)
    return 0


def find_start(recover: RecoverStore, recover_mode: str, folder: Path, *, resume: bool) -> Start:
    """The newest recover checkpoint, or the beginning. Raises ValueError when recover_mode=resume finds none."""
    checkpoint = recover.latest() if resume else None
    if checkpoint is None:
        if recover_mode == "resume":
            raise ValueError(
                f"recover_mode=resume: there is no recover checkpoint in {folder}; check experiment_name and "
                "trial_name, or start anew with recover_mode=auto"
            )
        return Start(state=_BEGINNING, rollout_state=None, checkpoint=None)
    state, rollout_state = recover.load(checkpoint)
    return Start(state=state, rollout_state=rollout_state, checkpoint=checkpoint)


def save_model(engines: TrainedEngines, checkpoints: Path, name: str, tokenizer_from: str) -> None:
    """`{checkpoints}/{engine}/{name}`: a Hugging Face folder for every trained engine."""
    for engine in engines:
        target = checkpoints / engine.name / name
        engine.group.call("save_hf", engine.name, str(target), tokenizer_from)
        logger.info("Saved %s to %s", engine.name, target)


def metric_sinks(config: ExperimentConfig, paths: RunPaths) -> list[MetricSink]:
    """Where the scalars of this run go."""
    sinks: list[MetricSink] = [JsonLinesSink(paths.logs / "metrics.jsonl")]
    if config.monitor.tensorboard:
        sinks.append(TensorBoardSink(paths.logs / "tensorboard"))
    if config.wandb.mode != "disabled":
        sinks.append(
            WandbSink(
                mode=config.wandb.mode,
                entity=config.wandb.entity,
                project=config.wandb.project or config.experiment_name,
                name=config.wandb.name or config.trial_name,
                group=config.wandb.group,
                tags=config.wandb.tags,
                config=config.model_dump(mode="json"),
                folder=paths.logs,
            )
        )
    if config.monitor.mlflow_uri is not None:
        sinks.append(
            MLflowSink(uri=config.monitor.mlflow_uri, experiment=config.experiment_name, name=config.trial_name)
        )
    return sinks
