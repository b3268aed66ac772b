"""Train a small model with random weights to add: first on examples, then by asynchronous PPO (`make demo`).

Data, tokenizer and model are made on the spot; training runs through core.quickstart, as a user would start it.
Everything ends up under one folder; the exit code is 0 only if held-out accuracy rose by at least 30 points.

    python -m tools.demo [--seed 1] [--output runs/demo] [--gpus 1]

With --gpus the sums are sampled by a SGLang server: on the trainer's own GPU (1) or on another (2).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from functools import partial
from pathlib import Path

from tools import arguments as cli
from tools.demo.data import DemoFiles, answer_of, make_demo_data
from tools.demo.plot import draw_run
from tools.demo.run import DemoError, accuracy, answers, first_at_least, run_quickstart, saved_models

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
    parser = argparse.ArgumentParser(
        prog=cli.program("tools.demo"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
