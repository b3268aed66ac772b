"""Train with a reward function of your own: a model with random weights learns to write sevens.

    python examples/custom_reward.py            # CPU, about a minute

A reward is a function (prompt, text) -> float. It runs in worker processes with a time limit; an answer that makes it
crash or hang scores as wrong, and the run continues.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import slipstream
from slipstream import Prompt


def share_of_sevens(prompt: Prompt, text: str) -> float:
    """Return the share of the answer's characters that are 7, in [0, 1]."""
    return text.count("7") / max(len(text), 1)


def main() -> None:
    """Train for 25 steps and print the mean reward of the first and the last ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/custom_reward"), help="folder to write to")
    output = parser.parse_args().output.absolute()
    files = slipstream.make_demo_data(output, seed=1)
    config = {
        "experiment_name": "custom-reward",
        "trial_name": "sevens",
        "exp_ctrl": {"total_train_epochs": 1, "total_train_steps": 25},
        "actor": {"path": str(files.model), "optimizer": {"lr": 2e-3}},
        "dataset": {"path": str(files.train), "max_prompt_len": 8, "train_bs_n_seqs": 16},
        "group_size": 8,
        "group_adv_norm": True,
        "ppo": {"gen": {"max_new_tokens": 6}, "ppo_n_minibatches": 1, "kl_ctl": 0.0, "disable_value": True},
        "external_configs": {"cluster_config": {"fileroot": str(output)}},
    }
    run = slipstream.train(config, **{"reward.function": share_of_sevens})
    rewards = [row["task_reward"] for row in run.metrics()]
    print(f"mean reward of steps 1 to 3: {sum(rewards[:3]) / 3:.2f}; of the last 3: {sum(rewards[-3:]) / 3:.2f}")


if __name__ == "__main__":
    main()
