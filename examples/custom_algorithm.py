"""Train with an algorithm of your own: REINFORCE with the mean reward of the batch as its baseline.

    python examples/custom_algorithm.py         # CPU, about a minute

An algorithm names the passes that the loop runs first, computes advantages from a batch, and returns the loss of one
microbatch as a weighted sum over tokens; the engine divides by the global sum of the token weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import slipstream

if TYPE_CHECKING:
    from core.data.rollout_batch import RolloutBatch
    from mcore_adapter.data.batch import ModelOutput, Sequences


class Reinforce(slipstream.Algorithm):
    """Maximise (reward - mean reward of the batch) * log-probability. Source: Williams 1992."""

    def __init__(self, settings: slipstream.AlgorithmSettings, options: Mapping[str, Any]) -> None:
        self._settings = settings

    def advantages(
        self, batch: RolloutBatch, fields: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Give every trained token of an answer the answer's advantage: [T]."""
        rewards = torch.tensor(batch.rewards)
        lens = torch.tensor(batch.cu_seqlens[1:] - batch.cu_seqlens[:-1])
        advantages = (rewards - rewards.mean()).repeat_interleave(lens) * fields["loss_mask"]
        mean = float(rewards.mean())
        figures = {"task_reward": mean, "kl_reward": 0.0, "final_reward": mean, "advantage": float(advantages.mean())}
        return {"advantages": advantages}, figures

    def loss(
        self, output: ModelOutput, fields: Mapping[str, Tensor], sequences: Sequences
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum -advantage * log-probability over the tokens of one microbatch."""
        assert output.logprobs is not None, "the policy returns log-probabilities"
        loss = -(fields["advantages"] * output.logprobs * fields["token_weights"]).sum()
        return loss, {"actor_loss": loss.detach()}


def share_of_sevens(prompt: slipstream.Prompt, text: str) -> float:
    """Return the share of the answer's characters that are 7, in [0, 1]."""
    return text.count("7") / max(len(text), 1)


def main() -> None:
    """Train for 25 steps and print the mean reward of the first and the last ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/custom_algorithm"), help="folder to write to")
    output = parser.parse_args().output.absolute()
    files = slipstream.make_demo_data(output, seed=1)
    config = {
        "experiment_name": "custom-algorithm",
        "trial_name": "reinforce",
        "exp_ctrl": {"total_train_epochs": 1, "total_train_steps": 25},
        "actor": {"path": str(files.model), "optimizer": {"lr": 2e-3}},
        "dataset": {"path": str(files.train), "max_prompt_len": 8, "train_bs_n_seqs": 16},
        "group_size": 8,
        "ppo": {"gen": {"max_new_tokens": 6}, "ppo_n_minibatches": 1, "kl_ctl": 0.0, "disable_value": True},
        "external_configs": {"cluster_config": {"fileroot": str(output)}},
    }
    run = slipstream.train(config, **{"algorithm.name": Reinforce, "reward.function": share_of_sevens})
    rewards = [row["task_reward"] for row in run.metrics()]
    print(f"mean reward of steps 1 to 3: {sum(rewards[:3]) / 3:.2f}; of the last 3: {sum(rewards[-3:]) / 3:.2f}")


if __name__ == "__main__":
    main()
