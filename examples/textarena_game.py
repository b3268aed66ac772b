"""Train on a game: a model with random weights learns to find a number that the environment compares with its guesses.

    python examples/textarena_game.py            # CPU, a few minutes

An environment is a class with reset, step and close; it runs in worker processes with time limits. Games of textarena
need no class: workflow.options.environment=textarena:FrozenLake-v0, with a model that reads English.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import slipstream


class FirstDigit:
    """The policy is to write the first digit of the row's sum; a wrong guess is answered by another try."""

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Return what follows the prompt: nothing."""
        self._wanted = row["solutions"][0].removeprefix("\\boxed{")[0]
        return ""

    def step(self, action: str) -> tuple[str, float, bool]:
        """Return (what the policy reads next, reward, whether the game is over)."""
        found = action[:1] == self._wanted
        return "=", float(found), found

    def close(self) -> None:
        """Release nothing."""


def main() -> None:
    """Train for 60 steps and print the mean reward of the first and the last ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/textarena_game"), help="folder to write to")
    output = parser.parse_args().output.absolute()
    files = slipstream.make_demo_data(output, seed=1)
    config = {
        "experiment_name": "game",
        "trial_name": "first-digit",
        "exp_ctrl": {"total_train_epochs": 1, "total_train_steps": 60},
        "actor": {"path": str(files.model), "optimizer": {"lr": 2e-3}},
        "dataset": {"path": str(files.train), "max_prompt_len": 8, "train_bs_n_seqs": 16},
        "group_size": 8,
        "group_adv_norm": True,
        "ppo": {"gen": {"max_new_tokens": 2}, "ppo_n_minibatches": 1, "kl_ctl": 0.0, "disable_value": True},
        "workflow": {"type": "environment", "options": {"max_turns": 3, "context_tokens": 64}},
        "external_configs": {"cluster_config": {"fileroot": str(output)}},
    }
    run = slipstream.train(config, **{"workflow.options.environment": FirstDigit})
    rewards = [row["task_reward"] for row in run.metrics()]
    print(f"mean reward of steps 1 to 3: {sum(rewards[:3]) / 3:.2f}; of the last 3: {sum(rewards[-3:]) / 3:.2f}")


if __name__ == "__main__":
    main()
