"""The yardstick: seconds until TRL's GRPOTrainer answers a share of held-out additions. Runs in TRL's own environment.

Invariant: imports nothing of this repository, so that an environment with trl alone can run it. Rewards are 1 for the
right sum and -1 else; what is not given here is TRL's default for one update per generation. Start-up and evaluations
are not timed.

    /path/to/trl-env/bin/python tools/bench/trl/accuracy.py --model DIR --train FILE.jsonl --held-out FILE.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

MAX_NEW_TOKENS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--train", type=Path, required=True, help='jsonl rows with "prompt" and "solutions"')
    parser.add_argument("--held-out", type=Path, required=True, help="rows like those of --train")
    parser.add_argument("--num-prompts", type=int, default=64, help="prompts a step")
    parser.add_argument("--group-size", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--algorithm", choices=("grpo", "dr_grpo"), default="grpo")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--eval-steps", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--target", type=float, default=0.8, help="training ends at this share")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    json.dump(train(given), sys.stdout)
    print()


def train(given: argparse.Namespace) -> dict[str, Any]:
    """Train until the target or the last step; return steps, accuracies and seconds of training at evaluations."""
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    rows, held_out = read(given.train), read(given.held_out)
    clock = Clock(tokenizer, held_out, given)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=str(given.model),
            processing_class=tokenizer,
            reward_funcs=lambda completions, answer, **_: [
                1.0 if text.strip() == right else -1.0 for text, right in zip(completions, answer, strict=True)
            ],
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock],
            args=GRPOConfig(
                output_dir=scratch,
                use_cpu=not torch.accelerator.is_available(),
                bf16=given.precision == "bfloat16",
                gradient_checkpointing=False,
                model_init_kwargs={"dtype": "float32"},
                per_device_train_batch_size=given.num_prompts * given.group_size,
                num_generations=given.group_size,
                max_completion_length=MAX_NEW_TOKENS,
                temperature=given.temperature,
                beta=0.0,
                **({"loss_type": "dr_grpo", "scale_rewards": "none"} if given.algorithm == "dr_grpo" else {}),
                learning_rate=given.lr,
                lr_scheduler_type="linear",
                warmup_steps=given.steps // 10,
                adam_beta2=0.99,
                weight_decay=0.0,
                max_steps=given.steps,
                seed=given.seed,
                save_strategy="no",
                logging_steps=1_000_000,
                report_to="none",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    return {"eval_steps": clock.steps, "accuracies": clock.accuracies, "eval_seconds": clock.seconds}


def read(path: Path) -> list[dict[str, str]]:
    """Return prompts and answers: the solution without its box."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{"prompt": r["prompt"], "answer": r["solutions"][0].removeprefix("\\boxed{").rstrip("}")} for r in rows]


class Clock(TrainerCallback):
    """Counts the seconds of training, and evaluates beside the clock."""

    def __init__(self, tokenizer: Any, held_out: list[dict[str, str]], given: argparse.Namespace) -> None:
        self._tokenizer, self._held_out, self._given = tokenizer, held_out, given
        self._trained, self._since = 0.0, 0.0
        self.steps: list[int] = []
        self.accuracies: list[float] = []
        self.seconds: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        self._measure(0, context["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        if state.global_step % self._given.eval_steps == 0:
            self._trained += time.perf_counter() - self._since
            control.should_training_stop |= self._measure(state.global_step, context["model"]) >= self._given.target

    def _measure(self, step: int, model: Any) -> float:
        """Answer the held-out prompts greedily, and start the clock again."""
        self.steps.append(step)
        self.seconds.append(self._trained)
        self.accuracies.append(accuracy(model, self._tokenizer, self._held_out))
        self._since = time.perf_counter()
        return self.accuracies[-1]


def accuracy(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> float:
    """Return the share of right answers; all prompts have the same number of tokens."""
    ids = torch.tensor([tokenizer(row["prompt"])["input_ids"] for row in rows], device=model.device)
    training = model.training
    model.eval()
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW_TOKENS, do_sample=False
        )
    model.train(training)
    texts = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
    return sum(text.strip() == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)


if __name__ == "__main__":
    main()
