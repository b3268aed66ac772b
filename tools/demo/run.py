"""The demo's verbs: run a configuration through core.quickstart, measure accuracy, choose a checkpoint, answer.

Invariant: training happens in `python -m core.quickstart`, the program that users start; nothing here trains.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout.data.encoder import Encoder
from rollout.data.prompts import PromptDataset
from rollout.plugins import python_path
from rollout.rewards.math import math_reward
from rollout.types import GenerateRequest, SamplingParams

_STEP = re.compile(r"\(global step (\d+)\) finishes.*execution time: \*([\d.]+)\*s")
_PROGRESS_EVERY_STEPS = 25
_LAST_LINES = 25


class DemoError(RuntimeError):
    """A part of the demo failed; the message names it and contains the end of its output."""


def run_quickstart(experiment: str, *overrides: str, log: Path, environment: Mapping[str, str]) -> None:
    """Run `python -m core.quickstart <experiment>` with the demo's configuration; its output goes to `log`, one line in
    25 steps to the terminal. Raises DemoError if it fails."""
    config = Path(__file__).with_name(f"demo-{experiment.removesuffix('-math')}.yaml")
    command = [sys.executable, "-P", "-m", "core.quickstart", experiment, "--config", str(config), *overrides]
    print(f"$ python -m core.quickstart {experiment} --config {config} {' '.join(overrides)}")
    lines: list[str] = []
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": python_path(), **environment},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        assert process.stdout is not None, "stdout is a pipe"
        for line in process.stdout:
            file.write(line)
            lines = [*lines[-_LAST_LINES:], line]
            show_progress(lines)
    if process.returncode != 0:
        raise DemoError(f"{experiment} ended with exit code {process.returncode}; {log} ends:\n{''.join(lines)}")


def show_progress(lines: Sequence[str]) -> None:
    """Print a line if the last of `lines` ends a step that is due."""
    found = _STEP.search(lines[-1])
    if not found or int(found.group(1)) % _PROGRESS_EVERY_STEPS:
        return
    text = "".join(lines)
    rewards = re.findall(r"'(task_reward)': ([-\d.e]+)", text) or re.findall(r"'(loss)': ([-\d.e]+)", text)
    figures = "".join(f", {name} {float(value):.3f}" for name, value in rewards[-1:])
    print(f"  step {found.group(1):>3}{figures}, {float(found.group(2)):.2f} s", flush=True)


def accuracy(model: Path, data: Path) -> float:
    """Return the share of the rows of `data` that the model answers correctly, greedily: in the embedded generator,
    judged by the reward that training uses."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = PromptDataset.load(data, Encoder(tokenizer), max_prompt_len=64, seed=0, shuffle=False).prompts
    sampling = SamplingParams(max_new_tokens=6, temperature=0.0, stop_token_ids=(tokenizer.eos_token_id,))
    requests = [
        GenerateRequest(request_id=str(p.index), prompt_ids=p.token_ids.tolist(), sampling=sampling) for p in prompts
    ]
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in asyncio.run(_generate(model, requests))]
    return sum(bool(t) and math_reward(p, t) > 0 for p, t in zip(prompts, texts, strict=True)) / len(prompts)


async def _generate(model: Path, requests: Sequence[GenerateRequest]) -> list[np.ndarray]:
    from rollout.inference.embedded.generator import EmbeddedGenerator

    generator = EmbeddedGenerator(model, max_running=512)
    try:
        return [completion.token_ids for completion in await generator.generate_many(requests)]
    finally:
        await generator.close()


def saved_models(fileroot: Path, experiment: str) -> list[Path]:
    """Return the Hugging Face folders that a run saved, oldest first."""
    found = fileroot.glob(f"checkpoints/*/{experiment}/*/*/epoch*globalstep*")
    return sorted(found, key=lambda path: int(path.name.rpartition("globalstep")[2]))


def first_at_least(folders: Sequence[Path], target: float, measure: Callable[[Path], float]) -> tuple[Path, float]:
    """Return the first folder whose measure reaches `target`, found by bisection (training makes it rise), else the
    last."""
    low, high = 0, len(folders) - 1
    values: dict[int, float] = {}
    while low < high:
        middle = (low + high) // 2
        values[middle] = measure(folders[middle])
        low, high = (low, middle) if values[middle] >= target else (middle + 1, high)
    return folders[high], values[high] if high in values else measure(folders[high])


def answers(model: Path, questions: Sequence[str]) -> list[str]:
    """Return the output of transformers' own generate(), with the folder loaded as any other model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    language_model: Any = AutoModelForCausalLM.from_pretrained(model)
    texts = []
    for question in questions:
        inputs = torch.tensor([tokenizer(question)["input_ids"]])
        output = language_model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=6, do_sample=False
        )
        texts.append(str(tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True)))
    return texts
