"""Runs whose generators and trainer were given their devices apart; those on GPUs carry the mark gpu."""

from typing import Any

import pytest

from helpers.runs import metrics_of, ppo
from rollout.inference.gpus import query_gpus


def trained(command: Any) -> list[dict[str, float]]:
    assert command.finish() == 0, command.output()[-4000:]
    return [m for m in metrics_of(command) if "task_reward" in m]


@pytest.mark.gpu
def test_a_mock_generator_feeds_a_trainer_on_a_gpu(assets: Any, run_command: Any) -> None:
    if not query_gpus():
        pytest.skip("needs a GPU")
    config = ppo(
        assets,
        allocation_mode="mock.d1m1p1",
        n_gpus_per_node=1,
        launch={"trainer_device": "cuda"},
        exp_ctrl={"total_train_steps": 2},
    )
    command = run_command("ppo-math", config)
    rows = trained(command)
    assert [m["n_seqs"] for m in rows] == [32.0] * 2 and all(m["push/gigabytes"] > 0 for m in rows)
    assert "megatron on cuda (launch.trainer_device=cuda)" in command.output()
