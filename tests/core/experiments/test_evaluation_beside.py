"""Evaluations on a generator that keeps its weights, beside training."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from helpers.commands import Command
from helpers.runs import metrics_of, mock_ppo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS = 6


def config(assets, folder: Path, **changes: object) -> dict:
    few = folder / "few.jsonl"
    few.write_text("".join(assets.prompts.read_text().splitlines(keepends=True)[:3]))
    own = mock_ppo(
        assets,
        allocation_mode="mock.d2m1p1+d1m1p1",
        n_gpus_per_node=3,
        ppo={"gen": {"max_new_tokens": 12}, "ppo_n_minibatches": 1},
        staleness={"max_staleness": 1},
        reward={"right_at": 1.0},
        samples={"share": 0.0},
        evaluation={
            "path": str(assets.prompts), "num_prompts": 4, "max_new_tokens": 60,
            "sets": {"few": {"path": str(few), "repeat": 3, "temperature": 1.0, "max_new_tokens": 90}},
        },
        exp_ctrl={"total_train_steps": NUM_STEPS, "eval_freq_steps": 1, "eval_at_start": True},
    )  # fmt: skip
    return own | changes


def evaluations(command: Command) -> dict[int, dict]:
    return {row["step"]: row for row in metrics_of(command) if "eval/few/accuracy" in row}


def test_an_evaluation_runs_beside_training_and_is_filed_under_its_version(assets, run_command, tmp_path: Path) -> None:
    run = run_command("ppo-math", config(assets, tmp_path))
    run.wait_for("Evaluating step 0 on generator-1 beside training")
    run.wait_for("step 2/")
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    run.stop()
    run = run_command("ppo-math", config(assets, tmp_path))
    assert run.finish() == 0, run.output()[-4000:]
    found = evaluations(run)
    assert 0 in found and NUM_STEPS in found, "the first and the last version"
    assert all({"eval/prompts/accuracy", "eval/few/pass@3"} <= row.keys() for row in found.values())
    steps = [row["step"] for row in metrics_of(run) if "loss" in row]
    assert steps == list(range(1, NUM_STEPS + 1)), "training goes on, and checkpoints continue it exactly"
    alone = run_command("ppo-math", config(assets, tmp_path, trial_name="alone", evaluation={}, exp_ctrl={
        "total_train_steps": NUM_STEPS, "ckpt_freq_steps": 1}))  # fmt: skip
    assert alone.finish() == 0, alone.output()[-4000:]
    trained = [row["loss"] for row in metrics_of(run) if "loss" in row]
    logs = next((alone.root / "logs").glob("*/test/alone"))
    assert trained == [json.loads(line)["loss"] for line in (logs / "metrics.jsonl").read_text().splitlines()]
