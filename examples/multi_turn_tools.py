"""Train with a tool: a model with random weights learns to write a question that a calculator answers.

    python examples/multi_turn_tools.py            # CPU, about a minute

The model writes a few characters. The calculator answers them, as context that is not trained, and the model writes its
answer. The reward is for questions that the calculator understands.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path
from typing import Any

import slipstream
from slipstream import Prompt, Sampler, SamplingParams, Trajectory, TrajectoryBuilder, recorded

_SUM = re.compile(r"(\d+)\+(\d+)")


async def calculate(question: str) -> str:
    """Return the sum in a question, or nothing where there is none."""
    found = _SUM.search(question)
    return f"={int(found[1]) + int(found[2])}" if found else "="


class Calculator:
    """Two turns: what the model asks the calculator, and what it answers."""

    class Config(slipstream.Section):
        """The keys of workflow.options."""

        reward: float = slipstream.key(1.0, "Reward of a question that the calculator understands", gt=0)

    def __init__(
        self, *, tokenizer: Any, reward_pool: Any, sampling: SamplingParams, group_size: int, seed: int, options: Config
    ) -> None:
        self._tokenizer, self._sampling, self._options = tokenizer, sampling, options
        self._group_size, self._seed = group_size, seed

    async def run(self, prompt: Prompt, generator: Sampler) -> list[Trajectory]:
        """Return one trajectory for each sample."""
        return await asyncio.gather(*(self._sample(prompt, generator, i) for i in range(self._group_size)))

    async def _sample(self, prompt: Prompt, generator: Sampler, number: int) -> Trajectory:
        sample = TrajectoryBuilder(prompt, number=number)
        asked = await generator.generate(sample.request(self._sampling, seed=self._seed))
        question = self._tokenizer.decode(asked.token_ids, skip_special_tokens=True)
        result = await recorded(f"calculator {number}", lambda: calculate(question), asked=question)
        sample.sampled(asked).observed(self._tokenizer.encode(result, add_special_tokens=False))
        sample.sampled(await generator.generate(sample.request(self._sampling, seed=self._seed)))
        return sample.build(self._options.reward * (len(result) > 1), {"calculated": float(len(result) > 1)})


def main() -> None:
    """Train for 25 steps and print the mean reward of the first and the last ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/multi_turn_tools"), help="folder to write to")
    output = parser.parse_args().output.absolute()
    files = slipstream.make_demo_data(output, seed=1)
    config = {
        "experiment_name": "multi-turn-tools",
        "trial_name": "calculator",
        "exp_ctrl": {"total_train_epochs": 1, "total_train_steps": 25},
        "actor": {"path": str(files.model), "optimizer": {"lr": 1e-3}},
        "dataset": {"path": str(files.train), "max_prompt_len": 8, "train_bs_n_seqs": 16},
        "group_size": 8,
        "group_adv_norm": True,
        "staleness": {"max_staleness": 0},
        "ppo": {"gen": {"max_new_tokens": 8}, "ppo_n_minibatches": 1, "kl_ctl": 0.0, "disable_value": True},
        "workflow": {"options": {"reward": 1.0}},
        "external_configs": {"cluster_config": {"fileroot": str(output)}},
    }
    run = slipstream.train(config, **{"workflow.type": Calculator})
    rewards = [row["task_reward"] for row in run.metrics()]
    print(f"mean reward of steps 1 to 3: {sum(rewards[:3]) / 3:.2f}; of the last 3: {sum(rewards[-3:]) / 3:.2f}")


if __name__ == "__main__":
    main()
