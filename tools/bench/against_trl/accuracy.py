"""Seconds of training until 80 % of held-out additions are right, against TRL's GRPOTrainer.

Both sides start from the same warm-up and see the same prompts, group size, reward and evaluations; each takes the best
of its own settings, which are found by a search of the same size: the faster precision first, then the learning rate.
Start-up and evaluations are not timed.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tools.bench.cpu import Scene
from tools.bench.figure import Figure
from tools.sweep.figures import seconds_to
from tools.sweep.runs import Run, run_one
from tools.sweep.warm import warm_up

WARM, TARGET = 0.6, 0.8
"""Shares of the held-out problems that are right after the warm-up and at the end."""
STEPS, EVAL_STEPS = 200, 10
FIRST_LR, OTHER_LRS, PRECISIONS = 2e-4, (1e-4, 4e-4), ("float32", "bfloat16")
"""What each side tries with the first seed: both precisions with FIRST_LR, then the others with the faster one."""
SEEDS = (1, 2, 3)
OURS: Mapping[str, Any] = {
    "algorithm.name": "grpo", "ppo.ppo_n_minibatches": 1, "exp_ctrl.eval_freq_steps": EVAL_STEPS,
    "reward.function": "tools.bench.reward:exact_reward", "generator.interrupt": "in_place",
    "allocation_mode": "embedded.d1m1p1+d2m1p1", "n_gpus_per_node": 3,
}  # fmt: skip
"""One update per generation as in TRL. Three single-threaded processes on two cores, as in `loop`."""

Measure = Callable[[float, str, int], float]
"""(learning rate, precision, seed) -> seconds, inf where the target was not reached."""


def time_to_accuracy(scene: Scene) -> Iterator[Figure]:
    """Yield the mean over seeds of the best settings of both sides, measured in turn."""
    warm = scene.folder / "warm"
    model = warm_up(warm, target=WARM)
    sides: list[Measure] = [lambda lr, precision, seed: ours(scene.folder, warm, model, lr, precision, seed)]
    if (python := scene.trl_python) is not None:
        sides.append(lambda lr, precision, seed: theirs(python, warm, model, lr, precision, seed))
    found = compare(sides)
    yield Figure(
        name="accuracy.seconds_to_80_percent", value=found[0], unit="s", baseline=found[1] if len(found) > 1 else None,
        target="<= 0.5x",
    )  # fmt: skip


def compare(sides: Sequence[Measure]) -> list[float]:
    """Search the best settings of each side with the first seed, then return their means over all seeds, run in
    turn."""
    best = [search(number, measure) for number, measure in enumerate(sides)]
    times: list[list[float]] = [[] for _ in sides]
    for seed, (number, measure) in itertools.product(SEEDS, enumerate(sides)):
        times[number].append(measure(*best[number], seed))
        print(f"side {number}: {best[number]}, seed {seed}: {times[number][-1]:.1f} s", flush=True)
    return [fmean(values) for values in times]


def search(number: int, measure: Measure) -> tuple[float, str]:
    """Return the (learning rate, precision) with which a side reached the target first."""
    seconds: dict[tuple[float, str], float] = {}

    def attempt(lr: float, precision: str) -> float:
        seconds[lr, precision] = measure(lr, precision, SEEDS[0])
        print(f"search, side {number}: lr {lr:g}, {precision}: {seconds[lr, precision]:.1f} s", flush=True)
        return seconds[lr, precision]

    precision = min(PRECISIONS, key=lambda p: attempt(FIRST_LR, p))
    for lr in OTHER_LRS:
        attempt(lr, precision)
    return min(seconds, key=lambda setting: seconds[setting])


def make_run(lr: float, precision: str, seed: int) -> Run:
    """Make the run of one of SEARCH."""
    changes = {**OURS, "actor.optimizer.lr": lr, "actor.bf16": precision == "bfloat16"}
    return Run(labels={"side": "ours", "lr": lr, "precision": precision, "seed": seed}, changes=changes)


def ours(folder: Path, warm: Path, model: Path, lr: float, precision: str, seed: int) -> float:
    """Run the loop of this project."""
    row = run_one(make_run(lr, precision, seed), folder / "accuracy", warm=warm, model=model, steps=STEPS)
    return math.inf if (seconds := seconds_to(row, TARGET)) is None else seconds


def theirs(python: Path, warm: Path, model: Path, lr: float, precision: str, seed: int) -> float:
    """Run TRL's loop, in its own environment."""
    command = [
        str(python), "tools/bench/trl/accuracy.py", "--model", str(model), "--train", str(warm / "data/train.jsonl"),
        "--held-out", str(warm / "data/held_out.jsonl"), "--lr", str(lr), "--precision", precision,
        "--steps", str(STEPS), "--eval-steps", str(EVAL_STEPS), "--target", str(TARGET), "--seed", str(seed),
    ]  # fmt: skip
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds = seconds_to(json.loads(output.splitlines()[-1]), TARGET)
    return math.inf if seconds is None else seconds
