"""Train a small model with random weights to add: first on examples, then by asynchronous PPO (`make demo`).

Data, tokenizer and model are made on the spot; training runs through core.quickstart, as a user would start it.
Everything ends up under one folder; the exit code is 0 only if held-out accuracy rose by at least 30 points.

    python -m tools.demo [--seed 1] [--output runs/demo] [--gpus 1]

With --gpus the sums are sampled by a SGLang server: on the trainer's own GPU (1) or on another (2).
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from core.processes.signals import INTERRUPTED
from rollout.data.encoder import Encoder
from rollout.data.prompts import PromptDataset
from rollout.plugins import python_path
from rollout.rewards.math import math_reward
from rollout.types import GenerateRequest, SamplingParams
from tools import arguments as cli
from tools.demo.data import DemoFiles, answer_of, make_demo_data
from tools.demo.plot import draw_run

_STEP = re.compile(r"\(global step (\d+)\) finishes.*execution time: \*([\d.]+)\*s")
_PROGRESS_EVERY_STEPS = 25
_LAST_LINES = 25


class DemoError(RuntimeError):
    """A part of the demo failed; the message names it and contains the end of its output."""


def run_quickstart(experiment: str, *overrides: str, log: Path, environment: Mapping[str, str]) -> None:
    """Run `python -m core.quickstart <experiment>` with the demo's configuration; its output goes to `log`, one line in
    25 steps to the terminal. Raises DemoError if it fails, and KeyboardInterrupt if it was interrupted."""
    config = Path(__file__).with_name(f"demo-{experiment.removesuffix('-math')}.yaml")
    command = [sys.executable, "-P", "-m", "core.quickstart", experiment, "--config", str(config), *overrides]
    command.append("monitor.style=areal")  # show_progress() reads these lines
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
        try:
            for line in process.stdout:
                file.write(line)
                lines = [*lines[-_LAST_LINES:], line]
                show_progress(lines)
        except KeyboardInterrupt:
            process.terminate()  # a signal to this process alone has not reached it
            process.communicate()
            raise
    if process.returncode == INTERRUPTED:
        raise KeyboardInterrupt
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
    language_model = AutoModelForCausalLM.from_pretrained(model)
    texts = []
    for question in questions:
        inputs = torch.tensor([tokenizer(question)["input_ids"]])
        output = language_model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=6, do_sample=False
        )
        texts.append(str(tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True)))
    return texts


WARM_UP_TARGET = 0.4
"""The warm-up ends at the first saved model that answers this share of the held-out problems."""
LEAST_GAIN = 0.30
NUM_QUESTIONS = 5
MARKER = ".slipstream-demo"
"""File that identifies the run of a folder."""
PLACES: dict[int, tuple[list[str], list[str]]] = {
    0: ([], []),
    1: (["allocation_mode=sglang.d1m1p1"], ["allocation_mode=sglang.d1m1p1", "n_gpus_per_node=1"]),
    2: (["allocation_mode=sglang.d1m1p1"], ["allocation_mode=sglang.d1m1p1+d1m1p1"]),
}
"""GPUs -> what the warm-up's configuration changes, and PPO's."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; without arguments the demo is the configuration in examples/configs."""
    parser = cli.parser_of("tools.demo", __doc__)
    parser.add_argument("--seed", type=cli.seed, default=1, help="seed of weights, data order and sampling")
    parser.add_argument(
        "--output",
        type=cli.new_folder,
        default=Path("runs/demo"),
        help="folder to write to; an earlier demo in it goes",
    )
    parser.add_argument("--gpus", type=int, choices=sorted(PLACES), default=0, help="GPUs to use; 0: the processor")
    parser.add_argument("--steps", type=cli.integer(least=1), help="PPO steps; else those of its configuration")
    return parser


def main() -> int:
    """Run the demo; return the exit code."""
    arguments = make_parser().parse_args()
    try:
        return run_demo(arguments.output.absolute(), seed=arguments.seed, gpus=arguments.gpus, steps=arguments.steps)
    except DemoError as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED


def run_demo(output: Path, *, seed: int, gpus: int, steps: int | None) -> int:
    """Run all parts of the demo; return the exit code."""
    began = time.monotonic()
    hide_progress_bars()
    empty(output)
    announce(f"1. Data and model -> {output}")
    files = make_demo_data(output, seed=seed)
    run = partial(run_quickstart, environment={"SLIPSTREAM_DEMO": str(output)})

    announce("2. Supervised warm-up, until it is right sometimes")
    run("sft", f"seed={seed}", *PLACES[gpus][0], log=output / "sft.log")
    measure = partial(accuracy, data=files.held_out)
    warm, before = first_at_least(saved_models(output, "demo-sft"), WARM_UP_TARGET, measure)
    print(f"  {warm.name.partition('globalstep')[2]} steps: {before:.1%} of the held-out problems right")

    announce("3. Asynchronous PPO: the generator may be two steps ahead of the trainer")
    run("ppo-math", *ppo_changes(warm, seed=seed, gpus=gpus, steps=steps), log=output / "ppo.log")
    trained = saved_models(output, "demo-ppo")[-1]
    after = measure(trained)

    announce("4. The saved folder, in transformers")
    show_answers(trained, files)
    picture = output / "reward_curve.png"
    draw(picture, output, before=before, after=after)
    gain = after - before
    announce("Summary")
    print(f"  held-out accuracy  {before:.1%} -> {after:.1%} ({gain * 100:+.1f} points)")
    print(f"  reward curve       {picture}")
    print(f"  trained model      {trained}")
    print(f"  time               {time.monotonic() - began:.0f} s")
    if gain < LEAST_GAIN:
        print(f"Accuracy rose by less than {LEAST_GAIN * 100:.0f} points: something is wrong.", file=sys.stderr)
        return 1
    return 0


def ppo_changes(model: Path, *, seed: int, gpus: int, steps: int | None) -> list[str]:
    """Return the changes of this demo to demo-ppo.yaml."""
    length = [] if steps is None else [f"exp_ctrl.total_train_steps={steps}"]
    return [f"seed={seed}", f"actor.path={model}", *length, *PLACES[gpus][1]]


def announce(text: str) -> None:
    print(f"\n== {text}", flush=True)


def empty(output: Path) -> None:
    """Remove what an earlier demo wrote; anything else in its folder stays. Raises DemoError for a folder that is not
    empty and that no demo made: its files are the user's."""
    made_here = output / MARKER
    if output.exists() and not output.is_dir():
        raise DemoError(f"--output {output} is no folder; name another one")
    if output.is_dir() and any(output.iterdir()) and not made_here.is_file():
        raise DemoError(
            f"--output {output} is not empty and was not made by the demo (no {MARKER} in it), which would delete "
            "data, model, logs, checkpoints and recover there; name another folder, or remove this one yourself"
        )
    output.mkdir(parents=True, exist_ok=True)
    made_here.write_text("python -m tools.demo made this folder and empties it when it runs again.\n")
    for name in ("data", "model", "logs", "checkpoints", "recover"):
        shutil.rmtree(output / name, ignore_errors=True)


def hide_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def show_answers(model: Path, files: DemoFiles) -> None:
    """Print a few held-out problems with the model's answers."""
    rows = [json.loads(line) for line in files.held_out.read_text(encoding="utf-8").splitlines()[:NUM_QUESTIONS]]
    for row, text in zip(rows, answers(model, [row["prompt"] for row in rows]), strict=True):
        print(f"  {row['prompt']}{text:<5} {'right' if text == answer_of(row) else f'wrong, {answer_of(row)}'}")


def draw(picture: Path, output: Path, *, before: float, after: float) -> None:
    """Draw the reward curve of the PPO run that wrote to `output`."""
    (metrics,) = output.glob("logs/*/demo-ppo/*/metrics.jsonl")
    title = f"Two-digit additions, 0.9M parameters: {before:.0%} → {after:.0%} of held-out problems"
    draw_run(picture, metrics, title=title)


if __name__ == "__main__":
    sys.exit(main())
