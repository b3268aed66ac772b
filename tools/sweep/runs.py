"""Run a list of configurations from one warm-up, several at a time, and keep one JSON row of each.

Invariant: a row is written once its run has ended well, in one move; a run that has a row is not repeated, so that a
sweep that was interrupted goes on where it was.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from core.monitoring.journal import read_rows
from tools.sweep.warm import quickstart

EXPERIMENT = "sweep"
BASE: Mapping[str, Any] = {
    "allocation_mode": "embedded.d1m1p1+d1m1p1",
    "n_gpus_per_node": 2,
    "actor.optimizer.lr": 2e-4,
    "actor.optimizer.beta2": 0.99,
    "actor.optimizer.weight_decay": 0,
    "actor.optimizer.eps": "1e-8",
    "actor.optimizer.lr_scheduler_type": "linear",
    "actor.optimizer.warmup_steps_proportion": 0.1,
    "dataset.max_prompt_len": 8,
    "dataset.train_bs_n_seqs": 64,
    "group_size": 8,
    "ppo.gen.max_new_tokens": 6,
    "ppo.ppo_n_minibatches": 2,
    "ppo.kl_ctl": 0.0,
    "staleness.max_staleness": 2,
    "generator.max_running": 256,
    "exp_ctrl.total_train_epochs": 100,
    "launch.threads_per_process": 1,
    "monitor.tensorboard": "false",
}
"""The demo's reinforcement learning with two updates a step: with one, ratios to the proximal policy would be 1."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a sweep."""

    labels: Mapping[str, Any]
    """What it is in tables: {"preset": "grpo", "seed": 1}."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys of the configuration."""

    @property
    def name(self) -> str:
        """Its folder and its file."""
        return "-".join(str(value) for value in self.labels.values())


def run_all(
    runs: Sequence[Run],
    folder: Path,
    *,
    warm: Path,
    model: Path,
    steps: int,
    jobs: int,
    busy: bool = False,
    given: Mapping[str, Any] | None = None,
) -> list[str]:
    """Run what has no row yet, `jobs` at a time. Return the messages of runs that failed; the others have rows.

    `busy`: other work runs on this host, and the rows name no host. `given`: keys that win over those of every run."""
    open_runs = [run for run in runs if not row_file(folder, run).exists()]
    print(f"{len(runs) - len(open_runs)} of {len(runs)} runs have rows; {len(open_runs)} to run", flush=True)
    failed: list[str] = []
    host = "" if busy else f"{os.cpu_count()} cores, {jobs} runs at a time"
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        share = 0.3 / jobs
        waiting = {
            pool.submit(
                run_one,
                run,
                folder,
                warm=warm,
                model=model,
                steps=steps,
                given=given or {},
                share_of_memory=share,
                host=host,
            ): run
            for run in open_runs
        }
        try:
            for done, future in enumerate(as_completed(waiting), start=1):
                run, error = waiting[future], future.exception()
                if error is not None:
                    failed.append(f"{run.name}: {error}")
                figures = "failed" if error is not None else summary(future.result())
                print(f"[{done}/{len(open_runs)}] {run.name}: {figures}", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C ends the runs under way, and no other starts
            raise
    return failed


def run_one(
    run: Run,
    folder: Path,
    *,
    warm: Path,
    model: Path,
    steps: int,
    given: Mapping[str, Any] | None = None,
    share_of_memory: float = 0.05,
    host: str = "",
) -> dict[str, Any]:
    """Run BASE with the changes of a run, and write its row. Raises RuntimeError where it fails."""
    run = replace(run, changes={**run.changes, **(given or {})})
    place = folder / "runs" / run.name
    shutil.rmtree(place, ignore_errors=True)  # of a run that was interrupted
    place.mkdir(parents=True)
    empty = place / "empty.yaml"
    empty.write_text("{}\n")
    changes = overrides(run, place, warm=warm, model=model, steps=steps)
    arguments = ["ppo-math", "--config", str(empty), *(f"{key}={value}" for key, value in changes.items())]
    quickstart(arguments, warm, log=place / "log.txt", share_of_memory=share_of_memory)
    (metrics,) = place.glob(f"logs/*/{EXPERIMENT}/*/metrics.jsonl")
    row = {**make_row(run, read_rows(metrics)), "host": host}
    write_row(row_file(folder, run), row)
    shutil.rmtree(place / "checkpoints", ignore_errors=True)
    return row


def overrides(run: Run, place: Path, *, warm: Path, model: Path, steps: int) -> dict[str, Any]:
    """Return the configuration of a run as dotted keys."""
    return {
        **BASE,
        "experiment_name": EXPERIMENT,
        "trial_name": run.name,
        "actor.path": model,
        "dataset.path": warm / "data" / "train.jsonl",
        "evaluation.path": warm / "data" / "held_out.jsonl",
        "external_configs.cluster_config.fileroot": place,
        "exp_ctrl.total_train_steps": steps,
        "exp_ctrl.eval_freq_steps": max(1, steps // 20),
        "seed": run.labels["seed"],
        **run.changes,
    }


def make_row(run: Run, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make a row: labels, held-out accuracies by step, seconds, the mean age of trained tokens in steps.

    `seconds` are those of the training steps themselves, without start-up and evaluations. Raises ValueError for a run
    without evaluations."""
    trained = [row for row in metrics if "task_reward" in row]
    evaluated = [row for row in metrics if "eval/accuracy" in row]
    if not evaluated:
        raise ValueError(f"run {run.name} was never evaluated: remove the --set that switches evaluations off")
    return {
        **run.labels,
        "steps": len(trained),
        "eval_steps": [row["step"] for row in evaluated],
        "accuracies": [row["eval/accuracy"] for row in evaluated],
        "eval_seconds": [sum(_seconds(r) for r in trained if r["step"] <= row["step"]) for row in evaluated],
        "rewards": [row["task_reward"] for row in trained],
        "seconds": sum(_seconds(row) for row in trained),
        "age": sum(row.get("staleness/mean", 0.0) for row in trained) / max(1, len(trained)),
        "clip_ratio": sum(row.get("actor_clip_ratio", 0.0) for row in trained) / max(1, len(trained)),
        "changes": dict(run.changes),
    }


def _seconds(metrics: Mapping[str, Any]) -> float:
    """Return the seconds of a step without its evaluation."""
    return float(metrics["time/step"] - metrics.get("time/evaluate", 0.0))


def summary(row: Mapping[str, Any]) -> str:
    """Return a line for the terminal."""
    return (
        f"accuracy {row['accuracies'][0]:.1%} -> {row['accuracies'][-1]:.1%} in {row['steps']} steps, "
        f"{row['seconds']:.0f} s, age {row['age']:.2f}"
    )


def read_keys(words: Sequence[str]) -> dict[str, str]:
    """Read KEY=VALUE words. Raises ValueError for others."""
    for word in words:
        if "=" not in word:
            raise ValueError(f"--set {word}: write KEY=VALUE")
    return dict(word.split("=", 1) for word in words)


def row_file(folder: Path, run: Run) -> Path:
    return folder / "rows" / f"{run.name}.json"


def write_row(path: Path, row: Mapping[str, Any]) -> None:
    """Write a row so that a file is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(row) + "\n", encoding="utf-8")
    os.replace(part, path)


def read_all(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a sweep by the names of their runs."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / "rows").glob("*.json"))]
