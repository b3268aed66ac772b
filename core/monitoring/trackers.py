"""Weights & Biases and MLflow: runs of them as metric sinks, which neither delay nor end the training.

A trial has one run of each: the next attempt, and the same command started again with recover_mode=auto, continue it. A
run that begins anew finds no ids: those of the earlier one went aside with its logs. Values of steps after the
recovered checkpoint remain: both only take more (docs/reliability.md). A thread sends what the loop hands over. What
could not be sent is counted and logged; metrics.jsonl has all of it.
"""

import json
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from core.config.parsing.problems import masked_urls
from core.errors import first_line
from core.monitoring.metrics import Histogram, Row
from core.monitoring.samples import Sample

logger = logging.getLogger(__name__)


_MOST_WAITING = 1000
"""Rows that wait for a tracker that does not answer; more are dropped."""


class Tracker(Protocol):
    """A service that takes metrics and samples of a run."""

    name: str
    """As users call it."""

    def write(self, step: int, metrics: Row) -> None: ...

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None: ...


class BackgroundTracker:
    """Sends rows to a tracker in the order in which they come."""

    def __init__(self, tracker: Tracker, *, close_seconds: float = 60.0) -> None:
        """`close_seconds`: close() waits at most this long for what has not been sent."""
        self._tracker, self._close_seconds = tracker, close_seconds
        self._rows: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_WAITING)
        self._lost = 0
        self._closed = False
        self._failing = False
        self._thread = threading.Thread(target=self._send, name=f"tracker {tracker.name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Row) -> None:
        """Hand over a row."""
        self._put(partial(self._tracker.write, step, dict(metrics)))

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Hand over samples."""
        self._put(partial(self._tracker.write_samples, step, list(samples)))

    def close(self) -> None:
        """Send what waits, within the limit, and log what was lost. Further calls do nothing."""
        if self._closed:
            return
        self._closed, name = True, self._tracker.name
        try:
            self._rows.put(None, timeout=self._close_seconds)
        except queue.Full:
            logger.warning("%s does not take what is left; it is abandoned.", name)
            return
        self._thread.join(self._close_seconds)
        if self._thread.is_alive():
            logger.warning("%s did not finish within %g s; what is left is abandoned.", name, self._close_seconds)
        if self._lost:
            logger.warning("%s: %d rows are missing there; metrics.jsonl has them.", name, self._lost)

    def _put(self, row: Callable[[], None]) -> None:
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._failed("it does not keep up")

    def _send(self) -> None:
        while (row := self._rows.get()) is not None:
            self._try(row)
        self._try(self._tracker.close)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 (whatever a library or a network raises; training does not need it)
            self._failed(f"{type(error).__name__}: {first_line(error)}")
            return
        if self._failing and call != self._tracker.close:
            self._failing = False
            logger.info("%s takes rows again.", self._tracker.name)

    def _failed(self, why: str) -> None:
        self._lost += 1
        if not self._failing:
            self._failing = True
            logger.warning("%s did not take a row (%s); training continues.", self._tracker.name, why)


SAMPLE_COLUMNS = (
    "step", "query_id", "index", "reward", "answer_tokens", "finish_reason", "oldest_version", "newest_version",
    "prompt", "answer",
)  # fmt: skip
"""Columns of the table of samples, after the column "notable"."""

_MLFLOW_BATCH = 1000
"""Metrics of one request: MLflow's limit."""


class TrackerError(ValueError):
    """A tracker cannot be used. The message names the key and the way out."""


class TrackedRuns:
    """The ids of a trial's runs in `file`, beside its logs."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._ids: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}

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

    name = "Weights & Biases"

    def __init__(self, *, runs: TrackedRuns, folder: Path, **options: Any) -> None:
        """Raises TrackerError when the service refuses the run or does not answer."""
        import wandb

        run_id = runs.get("wandb") or uuid.uuid4().hex[:12]
        try:
            # Another allocation or number of steps is allowed; the configuration is then that of the last attempt.
            self._run = wandb.init(dir=str(folder), id=run_id, resume="allow", allow_val_change=True, **options)
        except (wandb.errors.Error, ValueError) as error:
            raise TrackerError(
                f"wandb.mode={options.get('mode')}: Weights & Biases refused run {run_id}: {first_line(error)}; check "
                "WANDB_API_KEY, wandb.entity and wandb.project, or write offline or disabled"
            ) from error
        runs.put("wandb", run_id)

    def write(self, step: int, metrics: Row) -> None:
        """Log the metrics of a step; histograms as charts."""
        import wandb

        shown = {k: wandb.Histogram(np_histogram=v.bins()) for k, v in metrics.items() if isinstance(v, Histogram)}
        self._run.log({**metrics, **shown}, step=step)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log a table of the samples, one row each."""
        import wandb

        rows = [[", ".join(s.notable), *(getattr(s, name) for name in SAMPLE_COLUMNS)] for s in samples]
        self._run.log({"samples": wandb.Table(columns=["notable", *SAMPLE_COLUMNS], data=rows)}, step=step)

    def close(self) -> None:
        """End the run, and the process of wandb, which would be killed with those of the run."""
        import wandb

        self._run.finish()
        wandb.teardown()


class MLflowSink:
    """An MLflow run (extra `mlflow`)."""

    name = "MLflow"

    def __init__(self, *, runs: TrackedRuns, uri: str, experiment: str, name: str) -> None:
        """Another run begins, with a warning, where that of an earlier attempt is not at `uri` any more. Raises
        TrackerError when the server refuses or does not answer."""
        # Seven times, with pauses that double, is MLflow's own: minutes at the start, and at every step.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow would refuse folders
        import mlflow

        try:
            self._client = mlflow.MlflowClient(uri)
            self._run_id = self._open(runs.get("mlflow"), uri, experiment, name)
        except (mlflow.MlflowException, ImportError) as error:  # a database needs more packages than a server
            why = masked_urls(first_line(error))
            raise TrackerError(
                f"monitor.mlflow_uri={masked_urls(uri)}: {why}; start the server, or correct the "
                "address, MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or write null"
            ) from error
        runs.put("mlflow", self._run_id)

    def _open(self, known: str | None, uri: str, experiment: str, name: str) -> str:
        """Return the id of the run, which is active then."""
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        if known is not None and self._is_there(known, experiment_id):
            self._client.update_run(known, status="RUNNING")
            return known
        if known is not None:
            shown = masked_urls(uri)
            logger.warning(
                "monitor.mlflow_uri=%s: run %s of this trial does not exist; starting a new one", shown, known
            )
        run_id: str = self._client.create_run(experiment_id, run_name=name).info.run_id
        return run_id

    def _is_there(self, run_id: str, experiment_id: str) -> bool:
        from mlflow import MlflowException

        try:
            info = self._client.get_run(run_id).info
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        return bool(info.lifecycle_stage == "active" and info.experiment_id == experiment_id)

    def write(self, step: int, metrics: Row) -> None:
        """Log the metrics of a step without histograms, which MLflow does not have."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        scalars = {name: value for name, value in metrics.items() if not isinstance(value, Histogram)}
        rows = [Metric(name.replace("@", "_at_"), value, now, step) for name, value in scalars.items()]
        for begin in range(0, len(rows), _MLFLOW_BATCH):
            self._client.log_batch(self._run_id, metrics=rows[begin : begin + _MLFLOW_BATCH])

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Store the samples as a JSON artifact of the step."""
        rows = {"samples": [asdict(s) for s in samples]}
        self._client.log_dict(self._run_id, rows, f"samples/step-{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
