"""Train two copies of one policy against each other: a model with random weights learns to play Nim.

    python examples/self_play.py            # CPU, some minutes

Players take one, two or three of a pile in turn, and who takes the last one wins. "13-" asks for a move; everything
that is no move takes one. Each game is two trajectories, one for each side. Evaluation plays against the frozen start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import slipstream
from slipstream import Prompt, Sampler, SamplingParams, Trajectory, TrajectoryBuilder

_SMALLEST, _LARGEST = 8, 15
_NUM_HELD_OUT = 256


class Nim:
    """Games of the policy against itself, and against a frozen model for rows with the column `frozen`."""

    class Config(slipstream.Section):
        """The keys of workflow.options."""

        frozen: str = slipstream.key(description="Folder of the model that rows with the column frozen play against")

    def __init__(
        self, *, tokenizer: Any, reward_pool: Any, sampling: SamplingParams, group_size: int, seed: int, options: Config
    ) -> None:
        self._tokenizer, self._group_size, self._seed, self._options = tokenizer, group_size, seed, options
        self._sampling = replace(sampling, max_new_tokens=1)
        self._frozen_weights: dict[int, list[float]] = {}

    async def run(self, prompt: Prompt, generator: Sampler) -> list[Trajectory]:
        """Return a trajectory for each side that the policy plays."""
        numbers = range(self._group_size)
        if prompt.meta.get("frozen"):  # the policy begins every second game
            games = [(number, None) if prompt.index % 2 else (None, number) for number in numbers]
        else:
            games = [(number, number + 1) for number in numbers[::2]]
        played = await asyncio.gather(*(self._game(prompt, generator, sides) for sides in games))
        return [trajectory for game in played for trajectory in game]

    async def _game(self, prompt: Prompt, generator: Sampler, sides: tuple[int | None, ...]) -> list[Trajectory]:
        """Play one game. `sides`: the number of the sample of each player; None is the frozen model."""
        left = int(prompt.text.removesuffix("-"))
        samples: dict[int, TrajectoryBuilder] = {}
        turn = 0
        while left:
            number = sides[turn % 2]
            if number is None:
                move = await asyncio.to_thread(self._frozen_move, left, f"{prompt.query_id} {turn}")
            else:
                if number in samples:
                    samples[number].observed(self._encode(f"={left}-"))
                else:
                    samples[number] = TrajectoryBuilder(prompt, number=number, start=self._encode(f"{left}-"))
                answer = await generator.generate(samples[number].request(self._sampling, seed=self._seed))
                samples[number].sampled(answer)
                move = self._tokenizer.decode(answer.token_ids)
            left -= min(int(move) if move in ("2", "3") else 1, left)
            turn += 1
        winner = sides[(turn - 1) % 2]
        return [sample.build(float(number == winner), {"turns": float(turn)}) for number, sample in samples.items()]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _frozen_move(self, left: int, seed: str) -> str:
        """Sample a move of the frozen model; equal seeds give equal moves."""
        if not self._frozen_weights:
            self._frozen_weights = self._read_frozen()
        weights = self._frozen_weights[left]
        return str(self._tokenizer.decode(random.Random(seed).choices(range(len(weights)), weights)))

    def _read_frozen(self) -> dict[int, list[float]]:
        """Return the probabilities of the frozen model's tokens, by what is left."""
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self._options.frozen)
        with torch.no_grad():
            return {
                left: model(torch.tensor([self._encode(f"{left}-")])).logits[0, -1].float().softmax(-1).tolist()
                for left in range(1, _LARGEST + 1)
            }


def write_rows(path: Path, number: int, *, frozen: bool) -> Path:
    """Write rows with piles of all sizes; return their path."""
    sizes = range(_SMALLEST, _LARGEST + 1)
    rows = [
        {"prompt": f"{sizes[i % len(sizes)]}-", "solutions": ["1"], "query_id": f"{path.stem}-{i}", "frozen": frozen}
        for i in range(number)
    ]
    random.Random(1).shuffle(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def main() -> None:
    """Train, and print the share of games that the policy wins against its start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/self_play"), help="folder to write to")
    parser.add_argument("--steps", type=int, default=120, help="steps of training")
    parser.add_argument("--seed", type=int, default=1, help="of weights and samples")
    given = parser.parse_args()
    output = given.output.absolute()
    model = slipstream.make_demo_data(output, seed=given.seed).model
    config = {
        "experiment_name": "self-play",
        "trial_name": "nim",
        "seed": given.seed,
        "exp_ctrl": {"total_train_epochs": 9, "total_train_steps": given.steps, "eval_freq_steps": given.steps // 5},
        "actor": {"path": str(model), "optimizer": {"lr": 3e-4, "weight_decay": 0.0}},
        "dataset": {
            "path": str(write_rows(output / "train.jsonl", 4096, frozen=False)),
            "max_prompt_len": 8,
            "train_bs_n_seqs": 32,
        },
        "evaluation": {"path": str(write_rows(output / "held_out.jsonl", _NUM_HELD_OUT, frozen=True))},
        "group_size": 8,
        "group_adv_norm": True,
        "ppo": {"gen": {"max_new_tokens": 1}, "ppo_n_minibatches": 1, "kl_ctl": 0.0, "disable_value": True},
        "algorithm": {"entropy_coeff": 0.02},  # without it both copies soon play one game again and again
        "workflow": {"options": {"frozen": str(model)}},
        "external_configs": {"cluster_config": {"fileroot": str(output)}},
    }
    run = slipstream.train(config, **{"workflow.type": Nim})
    for row in run.metrics():
        if "eval/reward" in row:
            print(f"step {row['step']:.0f}: {row['eval/reward']:.3f} of the games against the start are won")


if __name__ == "__main__":
    main()
