"""The runs of one trial at Weights & Biases and MLflow, written for real: into a folder, without a network."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.checks.rules import load_config
from core.config.experiments import ExperimentConfig
from core.experiments import context
from core.experiments.context import open_trackers
from core.monitoring.metrics import Histogram
from core.monitoring.samples import Sample
from core.monitoring.trackers import MLflowSink, TrackedRuns, TrackerError, WandbSink
from core.runs.paths import RunPaths

SAMPLE = Sample(
    step=3, query_id="q7", episode="s/q7/0", index=0, prompt="1+1=", answer="2 <end>", reward=1.0, finish_reason="stop",
    prompt_tokens=4, answer_tokens=2, oldest_version=1, newest_version=2, notable=("best", "longest"),
)  # fmt: skip


def runs_of(folder: Path) -> TrackedRuns:
    return TrackedRuns(folder / "logs" / "tracked_runs.json")


def set_aside(folder: Path) -> None:
    """As a run does that begins anew."""
    (folder / "logs" / "tracked_runs.json").unlink()


def sft_config(*overrides: str) -> ExperimentConfig:
    required = ["experiment_name=e", "trial_name=trial", "allocation_mode=d1m1p1", "n_gpus_per_node=1"]
    paths = ["model.path=/m", "dataset.train_path=/d.jsonl"]
    return load_config("sft", None, [*required, *paths, *overrides]).config


class MLflow:
    """A store in a folder, and what it holds."""

    def __init__(self, folder: Path) -> None:
        self.module = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed (extra mlflow)")
        self.folder, self.uri = folder, f"file:{folder / 'store'}"

    def attempt(self, steps: list[int]) -> None:
        sink = MLflowSink(runs=runs_of(self.folder), uri=self.uri, experiment="e", name="trial")
        for step in steps:
            sink.write(step, {"loss": step / 10, "pass@1": 0.5, "staleness/ages": Histogram(np.array([0, 1]))})
        sink.close()

    def histories(self) -> list[list[int]]:
        """The steps of "loss" as the store tells them, run by run."""
        client = self.module.MlflowClient(self.uri)
        experiment = client.get_experiment_by_name("e")
        found = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])
        return [sorted(m.step for m in client.get_metric_history(run.info.run_id, "loss")) for run in found]

    def times(self) -> list[float]:
        """Seconds since 1970 of the values of "loss"."""
        client = self.module.MlflowClient(self.uri)
        (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
        return [m.timestamp / 1000 for m in client.get_metric_history(run.info.run_id, "loss")]


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MLflow:
    """In a shell without variables of MLflow, which itself refuses folders."""
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    return MLflow(tmp_path)


def test_attempts_share_one_mlflow_run_and_steps_that_are_repeated_are_there_twice(mlflow: MLflow) -> None:
    started = time.time()
    mlflow.attempt([1, 2, 3, 4])
    mlflow.attempt([3, 4, 5])  # recovered after step 2
    assert all(started - 1 <= seconds <= time.time() + 1 for seconds in mlflow.times())
    assert mlflow.histories() == [[1, 2, 3, 3, 4, 4, 5]]
    set_aside(mlflow.folder)
    mlflow.attempt([1])
    assert sorted(mlflow.histories()) == [[1], [1, 2, 3, 3, 4, 4, 5]]


@pytest.mark.parametrize("uri", ["sqlite:////nowhere/m.db", "bogus://x"])
def test_an_address_that_mlflow_cannot_use_is_an_error_of_its_key(mlflow: MLflow, uri: str) -> None:
    with pytest.raises(TrackerError, match=rf"^monitor\.mlflow_uri={uri}: .*; start the server, or correct"):
        MLflowSink(runs=runs_of(mlflow.folder), uri=uri, experiment="e", name="trial")


def test_attempts_share_one_wandb_run_with_histograms_and_a_table_of_samples(tmp_path, monkeypatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (extra wandb)")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged: list[dict[str, Any]] = []

    def attempt(step: int, **config: Any) -> None:
        sink = WandbSink(
            runs=runs_of(tmp_path), folder=tmp_path, mode="offline", project="p", name="trial",
            config=config,
        )  # fmt: skip
        log = sink._run.log
        monkeypatch.setattr(sink._run, "log", lambda row, step: (logged.append(row), log(row, step=step)))
        sink.write(step, {"loss": 0.5, "staleness/ages": Histogram(np.array([0, 0, 2]))})
        if step == 2:
            sink.write_samples(step, [SAMPLE])
        sink.close()

    attempt(1, allocation_mode="d1")
    attempt(2, allocation_mode="d2")
    # The id is in the name of the file: attempts within one second have folders offline-run-TIME-ID and -ID-1.
    ids = [file.stem.removeprefix("run-") for file in (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")]
    assert ids == [runs_of(tmp_path).get("wandb")] * 2, "each attempt leaves a folder, which bears the id of the run"
    assert logged[0]["loss"] == 0.5 and logged[0]["staleness/ages"].histogram == [2, 0, 1]
    (table,) = (tmp_path / "wandb").rglob("samples_*.table.json")
    stored = json.loads(table.read_text())
    (row,) = (dict(zip(stored["columns"], row, strict=True)) for row in stored["data"])
    assert row["notable"] == "best, longest" and row["answer"] == "2 <end>" and row["reward"] == 1.0


def test_samples_are_an_artifact_of_the_mlflow_run(mlflow: MLflow) -> None:
    sink = MLflowSink(runs=runs_of(mlflow.folder), uri=mlflow.uri, experiment="e", name="trial")
    sink.write_samples(3, [SAMPLE])
    sink.close()
    run_id = runs_of(mlflow.folder).get("mlflow")
    (file,) = (mlflow.folder / "store").rglob("step-000003.json")
    assert str(run_id) in str(file)
    (stored,) = json.loads(file.read_text())["samples"]
    assert stored["answer"] == "2 <end>" and stored["notable"] == ["best", "longest"]


def test_a_key_that_is_none_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (extra wandb)")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", "garbage")
    with pytest.raises(TrackerError, match=r"^wandb\.mode=online: .*API key.*; check WANDB_API_KEY"):
        WandbSink(runs=runs_of(tmp_path), folder=tmp_path, mode="online", project="p", name="trial")


def test_a_tracker_that_cannot_be_used_ends_the_first_attempt_and_only_the_first(tmp_path, monkeypatch, caplog) -> None:
    def refuse(**options: object) -> WandbSink:
        raise TrackerError("wandb.mode=offline: no")

    monkeypatch.setattr(context, "WandbSink", refuse)
    config, paths = sft_config("wandb.mode=offline"), RunPaths.for_trial(str(tmp_path), "e", "trial")
    with pytest.raises(TrackerError):
        open_trackers(config, paths)
    TrackedRuns(paths.logs / "tracked_runs.json").put("wandb", "a1")
    assert open_trackers(config, paths) == []
    assert "wandb.mode=offline: no. Training continues without it; if the run was deleted, remove " in caplog.text


def test_an_mlflow_run_that_was_deleted_is_followed_by_another_one(mlflow: MLflow, caplog) -> None:
    mlflow.attempt([1])
    run_id = runs_of(mlflow.folder).get("mlflow")
    assert run_id is not None
    mlflow.module.MlflowClient(mlflow.uri).delete_run(run_id)
    with caplog.at_level(logging.WARNING):
        mlflow.attempt([2])
    assert f"run {run_id} of this trial does not exist; starting a new one" in caplog.text
    assert mlflow.histories() == [[2]]
    mlflow.uri = f"file:{mlflow.folder / 'elsewhere'}"
    mlflow.attempt([3])
    assert mlflow.histories() == [[3]] and runs_of(mlflow.folder).get("mlflow") != run_id
