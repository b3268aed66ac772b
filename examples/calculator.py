"""Train a model to call a calculator where it cannot add by itself: with the tool, without it, from scratch.

    python examples/calculator.py                  # CPU, some minutes
    python examples/calculator.py --without-tool   # the same, where calls have no answer
    python examples/calculator.py allocation_mode=sglang.d1m1p1 n_gpus_per_node=1      # a GPU

A warm-up on both ways to answer, half of the rows each, teaches to write a call and to copy its result:
"12345+56789=" -> "12345+56789*", the calculator adds "69134=", -> "69134"; or "69134" at once. The numbers (six digits)
are too long for so small a model and so short a warm-up. Reinforcement learning then finds out which way is right.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import slipstream
from slipstream import Prompt, Sampler, SamplingParams, Trajectory, TrajectoryBuilder, recorded

_CALL = re.compile(r"(\d+)\+(\d+)\*")
_NUM_HELD_OUT = 256


async def calculate(call: str) -> str:
    """Return the result of a call, or nothing where it is malformed."""
    found = _CALL.fullmatch(call)
    return f"{int(found[1]) + int(found[2])}=" if found else "="


class Calculator:
    """One call of the calculator at most, and the answer."""

    class Config(slipstream.Section):
        """The keys of workflow.options."""

        with_tool: bool = slipstream.key(True, "Answer the calls of the calculator")

    def __init__(
        self, *, tokenizer: Any, reward_pool: Any, sampling: SamplingParams, group_size: int, seed: int, options: Config
    ) -> None:
        self._tokenizer, self._seed, self._options = tokenizer, seed, options
        self._group_size = group_size
        stop = tokenizer.convert_tokens_to_ids("*")
        self._sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, stop))

    async def run(self, prompt: Prompt, generator: Sampler) -> list[Trajectory]:
        """Return one trajectory for each sample."""
        return [await self._sample(prompt, generator, i) for i in range(self._group_size)]

    async def _sample(self, prompt: Prompt, generator: Sampler, number: int) -> Trajectory:
        sample = TrajectoryBuilder(prompt, number=number)
        first = await generator.generate(sample.request(self._sampling, seed=self._seed))
        sample.sampled(first)
        said = self._tokenizer.decode(first.token_ids, skip_special_tokens=True)
        called = said.endswith("*") and self._options.with_tool
        if called:
            result = await recorded(f"calculator {number}", lambda: calculate(said), asked=said)
            sample.observed(self._tokenizer.encode(result, add_special_tokens=False))
            second = await generator.generate(sample.request(self._sampling, seed=self._seed))
            sample.sampled(second)
            said = self._tokenizer.decode(second.token_ids, skip_special_tokens=True)
        return sample.build(float(said == prompt.answers[0]), {"called": float(called)})


def write_data(folder: Path, num_digits: int) -> tuple[Path, Path, Path]:
    """Write rows of sums for the warm-up, for training and for the end; return their paths."""
    rng, low, high = random.Random(1), 10 ** (num_digits - 1), 10**num_digits - 1
    pairs = list({(rng.randint(low, high), rng.randint(low, high)) for _ in range(20_000)})
    paths = folder / "warm_up.jsonl", folder / "train.jsonl", folder / "held_out.jsonl"
    rows = [{"prompt": f"{a}+{b}=", "solutions": [f"\\boxed{{{a + b}}}"], "query_id": f"{a}+{b}"} for a, b in pairs]
    answers = [f"{a}+{b}*{a + b}={a + b}" if i % 2 else f"{a + b}" for i, (a, b) in enumerate(pairs)]
    shown = [{"prompt": row["prompt"], "answer": text} for row, text in zip(rows, answers, strict=True)]
    parts = shown[_NUM_HELD_OUT:], rows[_NUM_HELD_OUT:], rows[:_NUM_HELD_OUT]
    for path, part in zip(paths, parts, strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    return paths


def main() -> None:
    """Warm up, train, and print the share of right answers to held-out sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/calculator"), help="folder to write to")
    parser.add_argument("--without-tool", action="store_true", help="leave calls without an answer")
    parser.add_argument("--digits", type=int, default=6, help="of the numbers")
    parser.add_argument("--warm-up-steps", type=int, default=300, help="supervised steps")
    parser.add_argument("--steps", type=int, default=60, help="steps of reinforcement learning")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the run after the warm-up")
    given = parser.parse_args()
    overrides = dict(pair.split("=", 1) for pair in given.overrides)
    output = given.output.absolute()
    model = slipstream.make_demo_data(output, seed=1).model
    warm_up, train, held_out = write_data(output, given.digits)
    root = {"external_configs": {"cluster_config": {"fileroot": str(output)}}}
    optimizer = {"lr": 2e-3, "weight_decay": 0.0, "warmup_steps_proportion": 0.1}
    steps = {"total_train_epochs": 9, "total_train_steps": given.warm_up_steps, "save_freq_steps": given.warm_up_steps}
    first = slipstream.train(
        {
            "experiment_name": "calculator",
            "trial_name": "warm-up",
            "allocation_mode": "d1m1p1",
            "n_gpus_per_node": 1,
            "exp_ctrl": steps,
            "model": {"path": str(model), "optimizer": optimizer},
            "dataset": {"train_path": str(warm_up), "train_bs_n_seqs": 128, "max_seqlen": 48},
            **root,
        },
        experiment="sft",
    )
    name = "without-tool" if given.without_tool else "with-tool"
    config = {
        "experiment_name": "calculator",
        "trial_name": name,
        "exp_ctrl": {"total_train_epochs": 9, "total_train_steps": given.steps, "eval_freq_steps": given.steps // 5},
        "actor": {"path": str(first.model), "optimizer": {"lr": 3e-4, "weight_decay": 0.0}},
        "dataset": {"path": str(train), "max_prompt_len": 16, "train_bs_n_seqs": 32},
        "evaluation": {"path": str(held_out)},
        "group_size": 8,
        "group_adv_norm": True,
        "ppo": {"gen": {"max_new_tokens": 16}, "ppo_n_minibatches": 1, "kl_ctl": 0.0, "disable_value": True},
        "workflow": {"options": {"with_tool": not given.without_tool}},
        **root,
    }
    run = slipstream.train(config, **{"workflow.type": Calculator, **overrides})
    rows = run.metrics()
    for row in rows:
        if found := {key: round(value, 3) for key, value in row.items() if "eval" in key and "reward" in key}:
            print(row.get("step"), found)
    rewards = [row["task_reward"] for row in rows if "task_reward" in row]
    print(f"{name}: reward of steps 1 to 3: {sum(rewards[:3]) / 3:.3f}; of the last 3: {sum(rewards[-3:]) / 3:.3f}")


if __name__ == "__main__":
    main()
