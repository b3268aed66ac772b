"""Two stages of one file, killed in the second one and started again."""

import json
import signal
import time
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

from helpers.commands import PATIENCE_SECONDS, Command

SFT, GRPO = "trial.1-sft", "trial.2-grpo"


def stages(assets) -> dict:
    """Fine-tuning, then eight steps of GRPO on the model that it saves."""
    return {
        "recover_mode": "auto",
        "monitor": {"tensorboard": False, "style": "compact"},
        "actor": {"path": str(assets.model), "optimizer": {"lr": 1e-3}},
        "stages": [
            {
                "sft": {
                    "dataset": {"path": str(assets.pairs), "max_seqlen": 16, "train_bs_n_seqs": 8},
                    "exp_ctrl": {"total_train_steps": 5},
                }
            },
            {
                "grpo": {
                    "allocation_mode": "embedded.d1m1p1+d1m1p1",
                    "n_gpus_per_node": 2,
                    "group_size": 2,
                    "dataset": {"path": str(assets.prompts), "train_bs_n_seqs": 4, "max_prompt_len": 8},
                    "ppo": {"gen": {"max_new_tokens": 3}, "ppo_n_minibatches": 1, "kl_ctl": 0.0},
                    "staleness": {"max_staleness": 0},
                    "reward": {"num_workers": 1},
                    "exp_ctrl": {"total_train_steps": 8, "ckpt_freq_steps": 1},
                }
            },
        ],
    }


def folder(command: Command, kind: str, trial: str) -> Path:
    return next((command.root / kind).glob("*/test")) / trial


def model(command: Command, trial: str) -> dict:
    (saved,) = folder(command, "checkpoints", trial).glob("*/epoch*/model.safetensors")
    return load_file(saved)


def rewards(command: Command) -> list[tuple[int, float]]:
    lines = (folder(command, "logs", GRPO) / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["reward/mean"]) for row in map(json.loads, lines)]


def kill_in_second_stage(command: Command) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not list(command.root.glob(f"recover/*/test/{GRPO}/globalstep*/COMMITTED")):
        assert command.process.poll() is None and time.monotonic() < deadline, command.output()[-4000:]
        time.sleep(0.02)
    command.remember_family()
    psutil.Process(command.process.pid).send_signal(signal.SIGKILL)
    command.process.wait()
    command.survivors()
    assert not (folder(command, "logs", GRPO) / "complete.json").exists()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_stages_killed_in_the_second_one_end_as_without_a_kill(assets, tmp_path_factory, run_command) -> None:
    undisturbed = Command("train", stages(assets), tmp_path_factory.mktemp("undisturbed"))
    try:
        assert undisturbed.finish() == 0, undisturbed.output()[-4000:]
        expected = [model(undisturbed, trial) for trial in (SFT, GRPO)], rewards(undisturbed)
    finally:
        undisturbed.stop()
    kill_in_second_stage(run_command("train", stages(assets)))
    command = run_command("train", stages(assets))
    assert command.finish() == 0, command.output()[-4000:]
    said = command.output()
    assert "stage 1-sft is complete" in said and "2 stages done in" in said
    assert "globalstep" in (folder(command, "logs", GRPO) / "master_worker.log").read_text()
    for trial, weights in zip((SFT, GRPO), expected[0], strict=True):
        found = model(command, trial)
        assert found.keys() == weights.keys() and all((found[name] == weights[name]).all() for name in weights)
    assert rewards(command) == expected[1]
    (sft,) = folder(command, "checkpoints", SFT).glob("*/epoch*")
    assert f"path: {sft}" in (folder(command, "logs", GRPO) / "config.yaml").read_text()
