"""Train on a game of textarena: a model with random weights learns to guess a number, 1 to 20, with five guesses.

    pip install textarena
    python examples/textarena_game.py            # CPU, some minutes
    python examples/textarena_game.py allocation_mode=sglang.d1m1p1 n_gpus_per_node=1    # a GPU

A warm-up on random guesses teaches what a game looks like: "10", "+" as the number is higher, "16", "-" as it is lower.
An environment is a class with reset, step and close; it runs in worker processes with time limits. A model that reads
English needs no class: workflow.options.environment=textarena:GuessTheNumber-v0.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import slipstream

_LARGEST, _GUESSES = 20, 5
_NUM_HELD_OUT = 256


class GuessTheNumber:
    """The game of textarena in single characters. The reward is 1 if the number is found."""

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Return what follows the prompt: nothing."""
        import textarena

        self._game = textarena.make("GuessTheNumber-v0-raw")
        self._game.reset(num_players=1, seed=seed % 2**31)
        return ""

    def step(self, action: str) -> tuple[str, float, bool]:
        """Return (what the policy reads next, reward, whether the game is over)."""
        is_over, _ = self._game.step(f"[{action}]")
        if is_over:
            rewards, _ = self._game.close()
            return "", float(rewards[0] == 1), True
        text = self._game.get_observation()[1][-1][1]
        return {"higher.": "+", "lower.": "-"}.get(text.split()[-1], "*"), 0.0, False

    def close(self) -> None:
        """Release nothing."""


def write_data(folder: Path) -> tuple[Path, Path, Path]:
    """Write random games for the warm-up, and rows for training and evaluation; return their paths."""
    rng = random.Random(1)
    games = []
    for _ in range(8192):
        number, said = rng.randint(1, _LARGEST), ""
        for guess in rng.sample(range(1, _LARGEST + 1), _GUESSES):
            said += f"{guess:02}" + "+-"[guess > number]
        games.append({"prompt": "=", "answer": said[:-1]})
    paths = folder / "warm_up.jsonl", folder / "train.jsonl", folder / "held_out.jsonl"
    parts = [games]
    for path, size in zip(paths[1:], (4096, _NUM_HELD_OUT), strict=True):
        parts.append([{"prompt": "=", "solutions": ["1"], "query_id": f"{path.stem}-{i}"} for i in range(size)])
    for path, part in zip(paths, parts, strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    return paths


def main() -> None:
    """Warm up, train, and print the share of numbers that are found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/textarena_game"), help="folder to write to")
    parser.add_argument("--steps", type=int, default=100, help="steps of reinforcement learning")
    parser.add_argument("--seed", type=int, default=1, help="of weights, games and samples")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the run after the warm-up")
    given = parser.parse_args()
    overrides = dict(pair.split("=", 1) for pair in given.overrides)
    output = given.output.absolute()
    model = slipstream.make_demo_data(output, seed=given.seed).model
    warm_up, train, held_out = write_data(output)
    root = {"external_configs": {"cluster_config": {"fileroot": str(output)}}}
    first = slipstream.train(
        {
            "experiment_name": "game",
            "trial_name": "warm-up",
            "seed": given.seed,
            "allocation_mode": "d1m1p1",
            "n_gpus_per_node": 1,
            "exp_ctrl": {"total_train_epochs": 9, "total_train_steps": 100, "save_freq_steps": 100},
            "model": {"path": str(model), "optimizer": {"lr": 2e-3, "weight_decay": 0.0}},
            "dataset": {"train_path": str(warm_up), "train_bs_n_seqs": 128, "max_seqlen": 32},
            **root,
        },
        experiment="sft",
    )
    config = {
        "experiment_name": "game",
        "trial_name": "guess-the-number",
        "seed": given.seed,
        "exp_ctrl": {"total_train_epochs": 9, "total_train_steps": given.steps, "eval_freq_steps": given.steps // 5},
        "actor": {"path": str(first.model), "optimizer": {"lr": 6e-4, "weight_decay": 0.0}},
        "dataset": {"path": str(train), "max_prompt_len": 8, "train_bs_n_seqs": 32},
        "evaluation": {"path": str(held_out)},
        "group_size": 8,
        "group_adv_norm": True,
        "ppo": {"gen": {"max_new_tokens": 2}, "ppo_n_minibatches": 1, "kl_ctl": 0.0, "disable_value": True},
        "workflow": {"type": "environment", "options": {"max_turns": _GUESSES, "context_tokens": 64}},
        **root,
    }
    run = slipstream.train(config, **{"workflow.options.environment": GuessTheNumber, **overrides})
    for row in run.metrics():
        if "eval/reward" in row:
            print(f"step {row['step']:.0f}: {row['eval/reward']:.3f} of the numbers are found")


if __name__ == "__main__":
    main()
