"""Runs on several task sets: each has its own sampling, reward and order. A killed run that evaluates on a second
generator, beside training, trains what an undisturbed one trains that evaluates nothing."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from helpers.commands import Command
from helpers.runs import changed, metrics_of, mock_ppo, rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS, BATCH_SIZE = 6, 6


def config(assets, folder: Path, **changes: object) -> dict:
    lines = assets.prompts.read_text().splitlines()
    for name, part in (("easy", lines[:8]), ("hard", lines[8:24])):
        leveled = [json.dumps({**json.loads(row), "level": -number}) for number, row in enumerate(part)]
        (folder / f"{name}.jsonl").write_text("\n".join(leveled) + "\n")
    own = mock_ppo(
        assets,
        dataset={"path": "", "train_bs_n_seqs": BATCH_SIZE},
        task_sets={
            "easy": {
                "path": str(folder / "easy.jsonl"), "weight": 2, "order": "curriculum", "curriculum": "level",
                "group_size": 3, "max_new_tokens": 4,
            },
            "hard": {
                "path": str(folder / "hard.jsonl"), "weight": 1, "order": "curriculum",
                "curriculum": "helpers.rewards:rarest_first", "reward": "helpers.rewards:length", "right_at": 5.0,
            },
        },
        staleness={"max_staleness": 0},
        generator={"mock_seconds_per_token": 0.02},  # the kill comes between the first checkpoint and the end
        reward={"right_at": 1.0},
        samples={"share": 0.0},
        exp_ctrl={"total_train_steps": NUM_STEPS, "total_train_epochs": 9},
    )  # fmt: skip
    return changed(own, changes)


def beside(assets, folder: Path) -> dict:
    """Two generators, of which one keeps its weights for an evaluation on two sets after every step."""
    few = folder / "few.jsonl"
    few.write_text("".join(assets.prompts.read_text().splitlines(keepends=True)[:3]))
    sets = {"few": {"path": str(few), "repeat": 3, "temperature": 1.0, "max_new_tokens": 90}}
    return {
        "allocation_mode": "mock.d2m1p1+d1m1p1",
        "n_gpus_per_node": 3,
        "evaluation": {"path": str(assets.prompts), "num_prompts": 4, "max_new_tokens": 60, "sets": sets},
        "exp_ctrl": {"eval_freq_steps": 1, "eval_at_start": True},
    }


def test_each_set_has_its_settings_and_a_killed_run_continues_bit_for_bit(
    assets, run_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))  # of helpers
    (tmp_path / "killed").mkdir()
    settings = config(assets, tmp_path)
    evaluating = config(assets, tmp_path, **beside(assets, tmp_path))
    undisturbed = run_command("ppo-math", settings)
    killed = Command("ppo-math", evaluating, tmp_path / "killed")
    try:
        killed.wait_for("Evaluating step 0 on generator-1 beside training")
        killed.wait_for("Dumped recover info to file.")
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait()
        killed.stop()
        killed = Command("ppo-math", evaluating, tmp_path / "killed")
        assert killed.finish() == 0, killed.output()[-4000:]
        assert "steps are done" in killed.output()
        assert undisturbed.finish() == 0, undisturbed.output()[-4000:]
        check_sets(undisturbed)
        assert rows(killed, "consumed.jsonl") == rows(undisturbed, "consumed.jsonl")
        check_evaluations(killed)
        for name in ("loss", "grad_norm", "task_reward", "task_set/easy/reward", "task_set/hard/right"):
            values = [[row[name] for row in metrics_of(run) if "loss" in row] for run in (killed, undisturbed)]
            assert values[0] == values[1], name
    finally:
        killed.stop()


def check_evaluations(run: Command) -> None:
    found = {row["step"]: row for row in metrics_of(run) if "eval/few/accuracy" in row}
    assert 0 in found and NUM_STEPS in found, "the first and the last version"
    assert all({"eval/prompts/accuracy", "eval/few/pass@3"} <= row.keys() for row in found.values())


def check_sets(run: Command) -> None:
    steps = [[id.split("/") for id in row["prompts"]] for row in rows(run, "consumed.jsonl")]
    assert [Counter(name for name, *_ in step) for step in steps] == [{"easy": 4, "hard": 2}] * NUM_STEPS
    easy = [row for step in steps[:2] for name, row, _ in step if name == "easy"]
    assert len(set(easy)) == 8 and easy == sorted(easy, key=easy.index), "each row once an epoch"
    metrics = rows(run, "metrics.jsonl")
    assert {row["n_seqs"] for row in metrics} == {4 * 3 + 2 * 2}
    assert all(row["task_set/easy/prompts"] == 4 and row["task_set/hard/prompts"] == 2 for row in metrics)
    assert max(row["task_set/hard/reward"] for row in metrics) > 1.0, "its own reward is a length"
    state = run.root.glob("recover/*/test/trial/globalstep6/rollout.json")
    sets = json.loads(next(state).read_text())["producer"]["dataset"]["sets"]
    assert {name: one["position"] for name, one in sets.items()} == {"easy": 24, "hard": 12}
