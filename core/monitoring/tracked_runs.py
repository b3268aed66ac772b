"""Runs of Weights & Biases and MLflow as metric sinks. A trial has one of each: the next attempt, and the same command
started again with recover_mode=auto, continue it.

Their values of steps after the recovered checkpoint remain: both only take more (docs/reliability.md).
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from core.monitoring.samples import Sample

SAMPLE_COLUMNS = (
    "step", "query_id", "index", "reward", "answer_tokens", "finish_reason", "oldest_version", "newest_version",
    "prompt", "answer",
)  # fmt: skip
"""Columns of the table of samples, after the column "notable"."""

logger = logging.getLogger(__name__)


class TrackedRuns:
    """The ids of a trial's runs in `file`, beside its logs. Unless the run continues, the file is of another run."""

    def __init__(self, file: Path, *, go_on: bool) -> None:
        self.file = file
        self._ids: dict[str, str] = json.loads(file.read_text()) if go_on and file.exists() else {}

    def get(self, service: str) -> str | None:
        """Return the id of the run to continue; None: there is none yet."""
        return self._ids.get(service)

    def put(self, service: str, run_id: str) -> None:
        """Set the id of the run. Raises OSError."""
        self._ids[service] = run_id
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_suffix(".writing")
        temporary.write_text(json.dumps(self._ids))
        os.replace(temporary, self.file)  # a killed driver leaves the old one or the new one


class WandbSink:
    """A Weights & Biases run (extra `wandb`); further keyword arguments are those of wandb.init."""

    def __init__(self, *, runs: TrackedRuns, folder: Path, **options: Any) -> None:
        """Raises RuntimeError when a run that was begun cannot be continued."""
        import wandb

        known = runs.get("wandb")
        run_id = known or uuid.uuid4().hex[:12]
        try:
            # Another allocation or number of steps is allowed; the configuration is then that of the last attempt.
            self._run = wandb.init(dir=str(folder), id=run_id, resume="allow", allow_val_change=True, **options)
        except wandb.errors.Error as error:
            if known is None:
                raise
            raise RuntimeError(
                f"wandb.mode={options.get('mode')}: run {run_id} of this trial cannot be continued: {error}. If it was "
                f"deleted there, remove {runs.file} to start a new one"
            ) from error
        runs.put("wandb", run_id)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log a table of the samples, one row each."""
        import wandb

        rows = [[", ".join(s.notable), *(getattr(s, name) for name in SAMPLE_COLUMNS)] for s in samples]
        self._run.log({"samples": wandb.Table(columns=["notable", *SAMPLE_COLUMNS], data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflowSink:
    """An MLflow run (extra `mlflow`)."""

    def __init__(self, *, runs: TrackedRuns, uri: str, experiment: str, name: str) -> None:
        """Another run begins, with a warning, where that of an earlier attempt is not at `uri` any more."""
        import mlflow

        self._mlflow = mlflow
        mlflow.set_tracking_uri(uri)
        experiment_id = mlflow.set_experiment(experiment).experiment_id
        known = runs.get("mlflow")
        if known is not None and not self._is_there(known, experiment_id):
            logger.warning("monitor.mlflow_uri=%s: run %s of this trial does not exist; starting a new one", uri, known)
            known = None
        run = mlflow.start_run(run_id=known) if known is not None else mlflow.start_run(run_name=name)
        runs.put("mlflow", run.info.run_id)

    def _is_there(self, run_id: str, experiment_id: str) -> bool:
        try:
            info = self._mlflow.get_run(run_id).info
        except self._mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        return bool(info.lifecycle_stage == "active" and info.experiment_id == experiment_id)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({k.replace("@", "_at_"): v for k, v in metrics.items()}, step=step)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Store the samples as a JSON artifact of the step."""
        self._mlflow.log_dict({"samples": [asdict(s) for s in samples]}, f"samples/step-{step:06d}.json")

    def close(self) -> None:
        self._mlflow.end_run()
