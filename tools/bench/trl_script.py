"""The yardstick: samples/s of TRL's GRPOTrainer on the same model and prompts. Runs in TRL's own environment.

Invariant: imports nothing of this repository, so that an environment with trl alone can run it. Every completion has
exactly --new-tokens tokens; the reward costs nothing; everything else is TRL's default for one step per generation. TRL
trains in bfloat16 unless configured otherwise: autocast over float32 weights on the CPU, bfloat16 weights on a GPU,
which are faster there.

    /path/to/trl-env/bin/python tools/bench/trl_script.py --model DIR --prompts FILE.jsonl --new-tokens 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--prompts", type=Path, required=True, help='jsonl rows with a "prompt"')
    parser.add_argument("--num-prompts", type=int, default=32, help="prompts a step")
    parser.add_argument("--group-size", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--new-tokens", type=int, required=True, help="length of every completion")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=20, help="measured steps, after those of the warm-up")
    parser.add_argument("--warm-up-steps", type=int, default=3)
    parser.add_argument("--warm-up-tokens", type=int, help="length of completions in the warm-up (default: the same)")
    parser.add_argument("--gpu", action="store_true", help="on the first GPU instead of the CPU")
    parser.add_argument("--micro-batch", type=int, help="sequences of a forward and backward pass (default: all)")
    arguments = parser.parse_args()
    seconds = step_seconds(arguments)
    samples = arguments.num_prompts * arguments.group_size
    print(json.dumps({"samples_per_second": samples / statistics.median(seconds)}))


def step_seconds(arguments: argparse.Namespace) -> list[float]:
    """Return seconds of each measured step: generation, reward, update."""
    start, ends = time.perf_counter(), list[float]()

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.perf_counter())
            print(f"step {len(ends)} ended after {ends[-1] - start:.1f} s", file=sys.stderr, flush=True)
            if len(ends) == arguments.warm_up_steps:
                set_length(trainer, arguments.new_tokens)

    rows = [json.loads(line) for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    samples = arguments.num_prompts * arguments.group_size
    micro_batch = arguments.micro_batch or samples
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=str(arguments.model),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
            train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=scratch,
                use_cpu=not arguments.gpu,
                bf16=arguments.precision == "bfloat16",
                gradient_checkpointing=False,
                model_init_kwargs={"dtype": arguments.precision if arguments.gpu else "float32"},
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=samples // micro_batch,
                num_generations=arguments.group_size,
                max_completion_length=arguments.new_tokens,
                generation_kwargs={"min_new_tokens": arguments.new_tokens},
                temperature=1.0,
                beta=0.0,
                learning_rate=1e-5,
                max_steps=arguments.warm_up_steps + arguments.steps,
                save_strategy="no",
                logging_steps=1_000_000,
                report_to="none",
                disable_tqdm=True,
            ),
        )
        set_length(trainer, arguments.warm_up_tokens or arguments.new_tokens)
        trainer.train()
    ends = ends[arguments.warm_up_steps - 1 :]
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]


def set_length(trainer: GRPOTrainer, tokens: int) -> None:
    """Set the length of all completions from the next generation on."""
    trainer.generation_config.max_new_tokens = tokens
    trainer.generation_config.min_new_tokens = tokens


if __name__ == "__main__":
    main()
