"""Sweeps: what runs again after an interruption, what a row holds, and how rows become tables and pictures."""

import _thread
import json
import math
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from core.algorithms import PRESETS
from core.config.allocation import resolve_allocation
from core.config.load import load_config
from tools import atlas, learning
from tools.bench.against_trl import accuracy
from tools.sweep import figures, runs, warm


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of the runs that were started; each writes the metrics of two steps and two evaluations, and one
    whose trial name holds "bad" fails."""
    calls: list[list[str]] = []

    def run(arguments: list[str], folder: Path, *, log: Path, share_of_memory: float) -> None:
        keys = dict(word.split("=", 1) for word in arguments[3:])
        calls.append(arguments)
        if "bad" in keys["trial_name"]:
            raise RuntimeError("ended with 1")
        if "interrupted" in keys["trial_name"]:
            _thread.interrupt_main()
            time.sleep(0.5)
        evaluates = "blind" not in keys["trial_name"]
        target = log.parent / "logs" / "user" / runs.EXPERIMENT / keys["trial_name"] / "metrics.jsonl"
        target.parent.mkdir(parents=True)
        rows: list[dict[str, Any]] = [
            {"step": 0, "eval/accuracy": 0.4},
            {"step": 1, "task_reward": -1.0, "time/step": 2.0, "staleness/mean": 0.0, "actor_clip_ratio": 0.1},
            {
                "step": 2,
                "task_reward": 3.0,
                "time/step": 4.5,
                "time/evaluate": 0.5,
                "staleness/mean": 1.0,
                "actor_clip_ratio": 0.3,
            },
            {"step": 2, "eval/accuracy": 0.9},
        ]
        rows = [row for row in rows if evaluates or "eval/accuracy" not in row]
        target.write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(runs, "quickstart", run)
    return calls


def test_a_run_with_a_row_is_not_repeated_and_one_that_failed_is(started: list[list[str]], tmp_path: Path) -> None:
    todo = [runs.Run(labels={"preset": name, "seed": 1}) for name in ("grpo", "bad")]

    def run() -> list[str]:
        return runs.run_all(todo, tmp_path, warm=tmp_path, model=tmp_path, steps=2, jobs=2)

    assert run() == ["bad-1: ended with 1"] and len(started) == 2
    (row,) = runs.read_all(tmp_path)
    assert row["host"] == f"{os.cpu_count()} cores, 2 runs at a time"
    other = [runs.Run(labels={"preset": "gspo", "seed": 1})]
    assert not runs.run_all(other, tmp_path, warm=tmp_path, model=tmp_path, steps=2, jobs=2, busy=True)
    assert [row["host"] for row in runs.read_all(tmp_path) if row["preset"] == "gspo"] == [""]
    assert run() == ["bad-1: ended with 1"] and len(started) == 4
    assert [row["preset"] for row in runs.read_all(tmp_path)] == ["grpo", "gspo"]


def test_no_run_starts_after_ctrl_c(started: list[list[str]], tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    todo = [runs.Run(labels={"preset": "interrupted", "seed": seed}) for seed in range(4)]
    try:
        with pytest.raises(KeyboardInterrupt):
            runs.run_all(todo, tmp_path, warm=tmp_path, model=tmp_path, steps=2, jobs=1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(started) <= 2, "the run under way, and at most one that starts before the interrupt arrives"


def test_a_run_without_evaluations_has_failed_and_the_others_have_rows(
    started: list[list[str]], tmp_path: Path
) -> None:
    todo = [runs.Run(labels={"preset": name, "seed": 1}) for name in ("blind", "grpo")]
    failed = runs.run_all(todo, tmp_path, warm=tmp_path, model=tmp_path, steps=2, jobs=1)
    assert len(failed) == 1 and failed[0].startswith("blind-1: run blind-1 was never evaluated: remove the --set")
    assert [row["preset"] for row in runs.read_all(tmp_path)] == ["grpo"]


def test_a_row_has_the_seconds_at_each_evaluation_and_means_over_steps(
    started: list[list[str]], tmp_path: Path
) -> None:
    run = runs.Run(labels={"preset": "grpo", "seed": 7}, changes={"algorithm.name": "grpo"})
    row = runs.run_one(run, tmp_path, warm=tmp_path, model=tmp_path, steps=2)
    assert row["accuracies"] == [0.4, 0.9] and row["eval_steps"] == [0, 2] and row["eval_seconds"] == [0, 6.0]
    assert row["rewards"] == [-1.0, 3.0] and (row["steps"], row["seconds"], row["age"]) == (2, 6.0, 0.5)
    assert row["clip_ratio"] == pytest.approx(0.2) and row["seed"] == 7
    assert {"seed=7", "algorithm.name=grpo"} <= set(started[0])
    assert json.loads((tmp_path / "rows" / "grpo-7.json").read_text()) == row


@pytest.mark.parametrize(
    "run",
    [
        *(learning.make_run(name, 1, Path("model")) for name in learning.NAMES),
        *(atlas.make_run(m, s, 1) for m in atlas.METHODS for s in (0, 8) if (m, s) not in atlas.UNNEEDED),
        accuracy.make_run(accuracy.Setting(lr=5e-4, precision="bfloat16", temperature=0.8, algorithm="maxrl"), 1),
        accuracy.make_run(accuracy.Setting(lr=5e-4, precision="bfloat16"), 2, changes=accuracy.OURS_ON_GPU),
    ],
    ids=lambda run: run.name,
)
def test_every_run_of_a_sweep_is_a_configuration(run: runs.Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("{}\n")
    assert json.loads(json.dumps(dict(run.changes))) == run.changes  # a row holds them
    changes = runs.overrides(run, tmp_path, warm=tmp_path, model=tmp_path, steps=40)
    config: Any = load_config("ppo-math", empty, [f"{key}={value}" for key, value in changes.items()]).config
    assert config.exp_ctrl.total_train_steps == 40
    assert config.exp_ctrl.eval_freq_steps == run.changes.get("exp_ctrl.eval_freq_steps", 2)
    assert config.algorithm_name == run.changes["algorithm.name"]
    assert config.ppo.gen.temperature == run.labels.get("temperature", 1.0)
    assert config.algorithm_name == run.labels.get("algorithm", config.algorithm_name)


@pytest.mark.parametrize(
    ("changes", "trainer"), [(accuracy.OURS, "cpu"), (accuracy.OURS_ON_GPU, "cuda")], ids=["OURS", "OURS_ON_GPU"]
)
def test_only_the_trainer_computes_on_the_gpu_of_a_time_to_accuracy(
    changes: dict[str, Any], trainer: str, tmp_path: Path
) -> None:
    run = accuracy.make_run(accuracy.Setting(lr=1e-4, precision="bfloat16"), 1, changes=changes)
    overrides = runs.overrides(run, tmp_path, warm=tmp_path, model=tmp_path, steps=40)
    (tmp_path / "empty.yaml").write_text("{}\n")
    words = [f"{key}={value}" for key, value in overrides.items()]
    roles = resolve_allocation(load_config("ppo-math", tmp_path / "empty.yaml", words).config).roles
    assert (roles["actor_gen"].device, roles["actor_train"].device) == ("cpu", trainer)


def test_keys_of_the_command_line_win_over_those_of_every_run(started: list[list[str]], tmp_path: Path) -> None:
    run = atlas.make_run("tis", 4, 1)
    runs.run_one(run, tmp_path, warm=tmp_path, model=tmp_path, steps=2, given={"actor.optimizer.lr": "1e-4", "seed": 5})
    assert {"actor.optimizer.lr=1e-4", "seed=5", "staleness.max_staleness=4"} <= set(started[0])
    assert json.loads((tmp_path / "rows" / "tis-4-1.json").read_text())["changes"]["actor.optimizer.lr"] == "1e-4"
    assert runs.read_keys(["a.b=c=d", "e=1"]) == {"a.b": "c=d", "e": "1"}
    with pytest.raises(ValueError, match="--set lr: write KEY=VALUE"):
        runs.read_keys(["lr"])


def test_every_preset_of_policy_gradients_is_in_the_learning_table() -> None:
    assert set(learning.NAMES) == set(PRESETS) - learning.OTHER_DATA


def row(preset: str, seed: int, accuracies: list[float]) -> dict[str, Any]:
    n = len(accuracies)
    return {
        "preset": preset, "seed": seed, "steps": 10 * (n - 1), "eval_steps": [10 * i for i in range(n)],
        "accuracies": accuracies, "eval_seconds": [5.0 * i for i in range(n)], "seconds": 5.0 * (n - 1), "age": 1.5,
        "clip_ratio": 0.02, "host": "2 cores, 1 runs at a time",
    }  # fmt: skip


def test_intervals_are_those_of_students_t() -> None:
    mean, half = figures.mean_and_interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.30 / math.sqrt(3))
    assert math.isnan(figures.mean_and_interval([1.0])[1])
    for count, quantile in ((10, 2.262), (11, 2.228), (12, 2.201), (21, 2.086), (31, 2.042)):
        values = [float(i) for i in range(count)]
        expected = quantile * statistics.stdev(values) / math.sqrt(count)
        assert figures.mean_and_interval(values)[1] == pytest.approx(expected, rel=0.002)
    assert figures.shown([0.5, 0.7], percent=True) == "60.0 ± 127.1 %" and figures.shown([12.4]) == "12"


def test_the_learning_table_shows_how_many_seeds_reached_the_target() -> None:
    rows = [row("grpo", 1, [0.4, 0.7, 0.9]), row("grpo", 2, [0.4, 0.5, 0.8]), row("gspo", 1, [0.4, 0.5, 0.69])]
    text = learning.table(learning.by_preset(rows))
    grpo, gspo, _, note = text.splitlines()[2:]
    assert grpo.startswith("| `grpo` | 2 | 20 | 85.0 ± 63.5 % |") and "| 15 ± 64 | 8 ± 32 | 0.500 | 2.0% |" in grpo
    assert gspo.startswith("| `gspo` | 1 | 20 | 69.0 % |") and "| — | — |" in gspo
    one = learning.table(learning.by_preset([*rows, row("gspo", 2, [0.4, 0.9, 0.9])]))
    assert "| 10 (1 of 2 seeds) | 5 |" in one
    assert note == "Seconds are those of one host: 2 cores, 1 runs at a time."


def test_the_seconds_of_the_learning_table_are_those_of_one_host() -> None:
    slow = {**row("grpo", 2, [0.4, 0.7, 0.9]), "host": "another", "seconds": 100.0, "eval_seconds": [0.0, 50.0, 100.0]}
    table = learning.table(learning.by_preset([row("grpo", 1, [0.4, 0.7, 0.9]), slow]))
    assert "| 10 ± 0 | 5 | 0.500 |" in table
    busy = {**row("gspo", 1, [0.4, 0.7, 0.9]), "host": ""}
    assert learning.table(learning.by_preset([busy, slow])).splitlines()[3].endswith("| 10 | — | — | 2.0% |")


def test_the_atlas_shows_decoupled_where_loglinear_has_nothing_to_interpolate() -> None:
    rows = [
        {**row("", 1, [0.4, accuracy]), "method": method, "staleness": staleness}
        for method, staleness, accuracy in (("decoupled", 0, 0.9), ("decoupled", 4, 0.7), ("loglinear", 4, 0.8))
    ]
    lines = atlas.table(rows).splitlines()
    assert lines[0] == "| method | staleness 0 | staleness 4 |"
    assert "| loglinear | 90.0 % | 80.0 % |" in lines and "| tis | — | — |" in lines
    assert lines[-1] == "| mean age of tokens, steps | 1.50 | 1.50 |"


def test_pictures_are_drawn_from_rows_of_any_length(tmp_path: Path) -> None:
    groups = {"grpo": [row("grpo", 1, [0.4, 0.8, 0.9]), row("grpo", 2, [0.4, 0.5])], "dapo": [row("dapo", 1, [0.4])]}
    assert figures.curve(groups["grpo"])[:2] == ([0, 10], [0.4, 0.65])
    figures.draw_curves(tmp_path / "a.png", groups, title="curves")
    figures.draw_by_staleness(tmp_path / "b.png", {"tis": {0: [0.9, 0.8], 4: [0.7]}}, title="atlas")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "b.png"))


def test_a_warm_up_that_has_ended_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [tmp_path / f"checkpoints/u/demo-sft/t/d/epoch1epochstep{n}globalstep{n}" for n in (10, 20, 30)]
    calls: list[list[str]] = []

    def train(arguments: list[str], folder: Path, *, log: Path) -> None:
        calls.append(arguments)
        for model in models:
            model.mkdir(parents=True)

    monkeypatch.setattr(warm, "make_ingredients", lambda folder, seed: type("Files", (), {"held_out": folder}))
    monkeypatch.setattr(warm, "quickstart", train)
    monkeypatch.setattr(warm, "accuracy", lambda model, data: 0.01 * models.index(model) + 0.39)
    assert warm.warm_up(tmp_path, seed=3) == models[1] and calls[0][-1] == "seed=3"
    assert warm.warm_up(tmp_path, seed=3) == models[1] and len(calls) == 1
