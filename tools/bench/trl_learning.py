"""Learning curve of TRL's GRPOTrainer on word problems, beside that of docs/real-model.md. Runs in TRL's environment.

Invariant: of this repository it imports only the reward, so that both sides judge answers equally. The settings are
those of the page: 64 prompts with 16 answers a step, two updates a step, DAPO's clip bounds and loss, a constant
learning rate. The seconds are those of training; evaluations are not counted.

    PYTHONPATH=. /path/to/trl-env/bin/python tools/bench/trl_learning.py --model DIR --train problems.jsonl \
        --held-out held_out.jsonl --seconds 450 --output trl.jsonl
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rollout.rewards.math import WRONG, UnparsableAnswerError, math_reward
from rollout.types import Prompt

UPDATES = 2
"""Of the weights, for each batch of answers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--train", type=Path, required=True, help='jsonl rows with "question" and "answer"')
    parser.add_argument("--held-out", type=Path, required=True, help="rows like those of --train")
    parser.add_argument("--output", type=Path, required=True, help="file for a row a step")
    parser.add_argument("--seconds", type=float, default=450.0, help="from the start of the program")
    parser.add_argument("--steps", type=int, default=300, help="most steps")
    parser.add_argument("--num-prompts", type=int, default=64, help="prompts a step")
    parser.add_argument("--group-size", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--new-tokens", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--micro-batch", type=int, default=64, help="sequences of a forward and backward pass")
    parser.add_argument("--eval-steps", type=int, default=10, help="steps between evaluations; 0: none")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--continuous", action="store_true", help="sample by continuous batching, not generate()")
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="float32", help="dtype of the weights")
    given = parser.parse_args()
    train(given, end=time.monotonic() + given.seconds)


def train(given: argparse.Namespace, *, end: float) -> None:
    """Train until the last step, or until `end`, a time of time.monotonic()."""
    tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="left")
    samples = given.num_prompts * given.group_size
    micro_batch = min(given.micro_batch, samples // UPDATES)
    accumulated = samples // UPDATES // micro_batch
    clock = Clock(tokenizer, read(given.held_out), given, end)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=str(given.model),
            processing_class=tokenizer,
            reward_funcs=clock.reward,
            train_dataset=Dataset.from_list(read(given.train)),
            callbacks=[clock],
            args=GRPOConfig(
                output_dir=scratch,
                use_cpu=not torch.accelerator.is_available(),
                bf16=True,
                gradient_checkpointing=False,
                model_init_kwargs={"dtype": given.weights, "attn_implementation": "sdpa"},
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=accumulated,
                steps_per_generation=accumulated * UPDATES,
                num_generations=given.group_size,
                max_completion_length=given.new_tokens,
                use_transformers_continuous_batching=given.continuous,
                temperature=1.0,
                beta=0.0,
                loss_type="dapo",
                epsilon=0.2,
                epsilon_high=0.28,
                learning_rate=given.lr,
                lr_scheduler_type="constant",
                adam_beta2=0.95,
                adam_epsilon=1e-8,
                weight_decay=0.0,
                max_grad_norm=1.0,
                max_steps=given.steps * UPDATES,
                seed=given.seed,
                save_strategy="no",
                logging_steps=1_000_000,
                report_to="none",
                disable_tqdm=True,
            ),
        )
        clock.model = trainer.model
        trainer.train()
    clock.measure(clock.step)


def read(path: Path) -> list[dict[str, Any]]:
    """Return prompts as messages, and answers."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{"prompt": [{"role": "user", "content": r["question"]}], "answer": str(r["answer"])} for r in rows]


def judge(text: str, answer: str) -> float:
    """Return the reward that Slipstream gives to an answer."""
    try:
        return math_reward(_prompt(answer), text)
    except UnparsableAnswerError:
        return WRONG


def _prompt(answer: str) -> Prompt:
    solutions = (f"\\boxed{{{answer}}}",)
    return Prompt(query_id="", index=0, task="math", text="", token_ids=np.empty(0, np.int32), solutions=solutions)


class Clock(TrainerCallback):
    """Counts seconds and tokens of training, evaluates outside of them, and writes a row for each step."""

    model: Any = None

    def __init__(self, tokenizer: Any, held_out: list[dict[str, Any]], given: argparse.Namespace, end: float) -> None:
        self._tokenizer, self._held_out, self._given, self._end = tokenizer, held_out, given, end
        self._seconds, self._since, self._tokens, self._reward, self._length = 0.0, 0.0, 0, 0.0, 0.0
        self.step = 0
        self._evaluated = -1

    def reward(
        self, completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        """Judge a batch of answers."""
        rewards = [judge(c[0]["content"], right) for c, right in zip(completions, answer, strict=True)]
        self._reward = sum(rewards) / len(rewards)
        tokens = sum(map(len, completion_ids))
        self._tokens += tokens
        self._length = tokens / len(rewards)
        return rewards

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.measure(0)
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % UPDATES:
            return
        self.step = state.global_step // UPDATES
        self._seconds += time.perf_counter() - self._since
        self._write(
            {
                "seconds": round(self._seconds, 1), "task_reward": round(self._reward, 4),
                "answer_tokens_per_second": round(self._tokens / self._seconds),
                "mean_length_tokens": round(self._length, 1),
            }
        )  # fmt: skip
        if self._given.eval_steps and self.step % self._given.eval_steps == 0:
            self.measure(self.step)
        control.should_training_stop |= time.monotonic() > self._end
        self._since = time.perf_counter()

    def measure(self, step: int) -> None:
        """Answer the held-out problems greedily, in one batch."""
        if step == self._evaluated or not self._given.eval_steps:
            return
        self._evaluated = step
        begin, training = time.perf_counter(), self.model.training
        self.model.eval()
        batch = self._tokenizer.apply_chat_template(
            [row["prompt"] for row in self._held_out], add_generation_prompt=True, padding=True, return_tensors="pt",
            return_dict=True,
        ).to(self.model.device)  # fmt: skip
        with torch.inference_mode(), torch.autocast(self.model.device.type, torch.bfloat16):
            output = self.model.generate(**batch, max_new_tokens=self._given.new_tokens, do_sample=False)
        self.model.train(training)
        answers = output[:, batch["input_ids"].shape[1] :]
        texts = self._tokenizer.batch_decode(answers, skip_special_tokens=True)
        right = [judge(text, row["answer"]) > 0 for text, row in zip(texts, self._held_out, strict=True)]
        length = (answers != self._tokenizer.pad_token_id).sum().item() / len(texts)
        self._write(
            {
                "eval/accuracy": round(sum(right) / len(right), 4), "eval/mean_length_tokens": round(length, 1),
                "eval/seconds": round(time.perf_counter() - begin, 1),
            },
            step,
        )  # fmt: skip

    def _write(self, values: dict[str, float], step: int | None = None) -> None:
        line = json.dumps({"step": self.step if step is None else step, **values})
        print(line, flush=True)
        with self._given.output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
