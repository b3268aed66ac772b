"""A reward asks the auxiliary model, which is one of the generators and comes back after its server was killed."""

from pathlib import Path

import pytest

from helpers.chat_tokenizer import chat_tokenizer
from helpers.runs import lost, metrics_of, ppo, process_of
from helpers.sglang_environment import Models

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def test_a_reward_asks_the_auxiliary_model_which_comes_back(assets, run_command, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))  # of helpers
    judge = tmp_path / "judge"
    Models(judge)
    chat_tokenizer().save_pretrained(judge)
    command = run_command(
        "ppo-math",
        ppo(
            assets,
            allocation_mode="embedded.d2m1p1+d1m1p1",
            n_gpus_per_node=3,
            auxiliary={"path": str(judge)},
            reward={"function": "helpers.rewards:length_of_auxiliary", "timeout_seconds": 60.0},
            recover_mode="auto",
            exp_ctrl={"ckpt_freq_steps": 1, "total_train_epochs": 2},
        ),
    )
    command.wait_for("Dumped recover info to file.")
    process_of(command, "auxiliary-0").kill()
    assert "a server of the auxiliary model (auxiliary.path) is lost: auxiliary-0" in lost(command, 1)
    assert command.finish() == 0, command.output()[-4000:]
    rewards = [row["task_reward"] for row in metrics_of(command)]
    assert len(rewards) >= 10 and min(rewards) > 1.0, "each answer was judged"
