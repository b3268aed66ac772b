"""Seconds of training until 80 % of held-out additions are right, against TRL's GRPOTrainer.

Both sides start from the same warm-up and see the same prompts, group size, reward and evaluations; each takes the best
of its own settings, which are found by a search of the same size: the faster precision first, then the best learning
rate with it, then the best pair of temperature and algorithm. On the CPU and, with fewer settings, on one GPU.
Start-up and evaluations are not timed.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from allocation.device import GPU
from tools.bench.against_trl.peer import output_of
from tools.bench.cpu import Scene
from tools.bench.figure import Figure
from tools.bench.gpu import Scene as GpuScene
from tools.sweep.figures import seconds_to
from tools.sweep.runs import Run, run_one
from tools.sweep.warm import warm_up

WARM, TARGET = 0.6, 0.8
"""Shares of the held-out problems that are right after the warm-up and at the end."""
STEPS, EVAL_STEPS = 200, 10
LIMIT_SECONDS = 900.0
"""Of a run of TRL, evaluations included."""
OURS: Mapping[str, Any] = {
    "ppo.ppo_n_minibatches": 1, "exp_ctrl.eval_freq_steps": EVAL_STEPS,
    "reward.function": "tools.bench.reward:exact_reward", "generator.interrupt": "in_place",
    "recover_mode": "disabled", "staleness.max_staleness": 1, "generator.max_running": 512,
}  # fmt: skip
"""One update per generation, and no checkpoint, as in TRL. One trainer rank and one generator, a thread each, on two
cores: with two ranks a step took 12 % longer. All completions of a step run at once, as in TRL."""
OURS_ON_GPU: Mapping[str, Any] = {
    **OURS, "allocation_mode": "embedded.d1m1p1", "n_gpus_per_node": 1, "launch.trainer_device": GPU,
    "launch.threads_per_process": 4,
}  # fmt: skip
"""The trainer has the GPU. A model as small as this one is sampled by the embedded generator, on the CPU: a server on
the GPU takes longer for its HTTP requests than for its tokens. Steps with four threads a process took less time than
with one."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a search chooses."""

    precision: str
    lr: float
    temperature: float = 1.0
    algorithm: str = "grpo"
    """`algorithm.name` here. In TRL, "grpo" leaves the loss at GRPOTrainer's default; "dr_grpo" is the loss of that
    name, without scaled rewards."""

    @property
    def name(self) -> str:
        return f"{self.precision}, lr {self.lr:g}, temperature {self.temperature:g}, {self.algorithm}"


Measure = Callable[[Setting, int], float]
"""(setting, seed) -> seconds, inf where the target was not reached."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a side tries with the first seed: all precisions with the first value of everything else, then the other
    learning rates with the fastest, then, with the best of those, every pair of temperature and algorithm. The best
    runs with all seeds."""

    precisions: tuple[str, ...]
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]
    temperatures: tuple[float, ...] = (1.0,)
    algorithms: tuple[str, ...] = ("grpo",)

    def best(self, measure: Callable[[Setting], float]) -> Setting:
        """Return the setting with the lowest measure."""
        seconds: dict[Setting, float] = {}

        def best_of(settings: Iterable[Setting]) -> Setting:
            for setting in settings:
                if setting not in seconds:
                    seconds[setting] = measure(setting)
            return min(seconds, key=lambda setting: seconds[setting])

        first = Setting(
            precision=self.precisions[0], lr=self.lrs[0], temperature=self.temperatures[0], algorithm=self.algorithms[0]
        )
        best = best_of(replace(first, precision=precision) for precision in self.precisions)
        best = best_of(replace(best, lr=lr) for lr in self.lrs)
        pairs = itertools.product(self.temperatures, self.algorithms)
        return best_of(replace(best, temperature=temperature, algorithm=algorithm) for temperature, algorithm in pairs)


ON_CPU = Search(
    precisions=("float32", "bfloat16"), lrs=(1e-4, 5e-5, 2e-4), temperatures=(1.0, 0.8), algorithms=("grpo", "maxrl"),
    seeds=(1, 2, 3),
)  # fmt: skip
PEER_ON_CPU = replace(ON_CPU, algorithms=("grpo", "dr_grpo"))
"""TRL has no maxrl."""
ON_GPU = replace(ON_CPU, precisions=("bfloat16",), lrs=(1e-4, 5e-5))
PEER_ON_GPU = replace(PEER_ON_CPU, precisions=("bfloat16", "float32"), lrs=(1e-4,))
"""As many attempts as ON_GPU. In TRL both precisions have float32 weights there."""


def time_to_accuracy(scene: Scene) -> Iterator[Figure]:
    """Yield the mean over seeds of the best settings of both sides, measured in turn, on the CPU."""
    yield _figure("accuracy.seconds_to_80_percent", compare(_sides(scene, OURS, (ON_CPU, PEER_ON_CPU))))


def time_to_accuracy_on_gpu(scene: GpuScene) -> Iterator[Figure]:
    """Yield the same with one GPU."""
    yield _figure("accuracy.seconds_to_80_percent_on_gpu", compare(_sides(scene, OURS_ON_GPU, (ON_GPU, PEER_ON_GPU))))


def _figure(name: str, found: Sequence[float]) -> Figure:
    return Figure(
        name=name, value=found[0], unit="s", baseline=found[1] if len(found) > 1 else None, target="<= 0.5x"
    )  # fmt: skip


def _sides(
    scene: Scene | GpuScene, changes: Mapping[str, Any], searches: Sequence[Search]
) -> list[tuple[Measure, Search]]:
    """Return this project, and TRL where there is an environment with it."""
    warm = scene.folder / "warm"
    model = warm_up(warm, target=WARM)
    sides: list[Measure] = [
        lambda setting, seed: ours(scene.folder, warm, model, make_run(setting, seed, changes=changes))
    ]
    if (python := scene.trl_python) is not None:
        sides.append(lambda setting, seed: theirs(python, warm, model, setting, seed))
    return list(zip(sides, searches, strict=False))


def compare(sides: Sequence[tuple[Measure, Search]]) -> list[float]:
    """Search the best settings of each side, then return their means over all seeds, run in turn."""
    best = [
        plan.best(partial(_attempt, number, measure, plan.seeds[0])) for number, (measure, plan) in enumerate(sides)
    ]
    times: list[list[float]] = [[] for _ in sides]
    for seed, (number, (measure, _)) in itertools.product(sides[0][1].seeds, enumerate(sides)):
        times[number].append(measure(best[number], seed))
        print(f"side {number}: {best[number].name}, seed {seed}: {times[number][-1]:.1f} s", flush=True)
    return [fmean(values) for values in times]


def _attempt(number: int, measure: Measure, seed: int, setting: Setting) -> float:
    seconds = measure(setting, seed)
    print(f"search, side {number}: {setting.name}: {seconds:.1f} s", flush=True)
    return seconds


def make_run(setting: Setting, seed: int, *, changes: Mapping[str, Any] = OURS) -> Run:
    """Make the run of a setting."""
    changes = {
        **changes, "actor.optimizer.lr": setting.lr, "actor.bf16": setting.precision == "bfloat16",
        "ppo.gen.temperature": setting.temperature, "algorithm.name": setting.algorithm,
    }  # fmt: skip
    return Run(labels={"side": "ours", **asdict(setting), "seed": seed}, changes=changes)


def ours(folder: Path, warm: Path, model: Path, run: Run) -> float:
    """Run the loop of this project."""
    row = run_one(run, folder / "accuracy", warm=warm, model=model, steps=STEPS)
    return math.inf if (seconds := seconds_to(row, TARGET)) is None else seconds


def theirs(python: Path, warm: Path, model: Path, setting: Setting, seed: int) -> float:
    """Run TRL's loop, in its own environment."""
    command = [
        str(python), "tools/bench/trl/accuracy.py", "--model", str(model), "--train", str(warm / "data/train.jsonl"),
        "--held-out", str(warm / "data/held_out.jsonl"), "--lr", str(setting.lr), "--precision", setting.precision,
        "--temperature", str(setting.temperature), "--algorithm", setting.algorithm,
        "--steps", str(STEPS), "--eval-steps", str(EVAL_STEPS), "--target", str(TARGET), "--seed", str(seed),
    ]  # fmt: skip
    output = output_of(command, LIMIT_SECONDS)
    seconds = seconds_to(json.loads(output.splitlines()[-1]), TARGET)
    return math.inf if seconds is None else seconds
