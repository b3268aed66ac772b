"""Compare what replay and a curriculum save: held-out accuracy of the demo against the tokens that were sampled.

    python -m tools.experience.savings --seeds 1 2 3 --output runs/savings            # processor; minutes a run
    python -m tools.experience.savings --ways all fewer replay --gpus 1 --steps 300   # SGLang and trainer on one GPU
    python -m tools.experience.savings --output runs/savings --picture savings.png    # draws what is measured already

Every way of a seed starts from the same warm-up (tools/demo). What is complete is in OUTPUT/results.jsonl, and is not
measured again.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import mean, stdev
from typing import TypedDict

from rich.console import Console
from rich.table import Table

from core.monitoring.metrics import read_rows
from rollout.data.task_sets import Candidate
from rollout.rewards.math import RIGHT, WRONG
from tools.arguments import integer, parser_of, seed
from tools.demo.__main__ import (
    PLACES,
    WARM_UP_TARGET,
    accuracy,
    first_at_least,
    hide_progress_bars,
    ppo_changes,
    run_quickstart,
    saved_models,
)
from tools.demo.data import make_demo_data

_REPLAY = ("dataset.train_bs_n_seqs=38", "experience.replay.share=0.4", "experience.replay.max_uses=2")
_BY_SUCCESS = (
    "task_sets.sums.path=${oc.env:SLIPSTREAM_DEMO}/data/train.jsonl",
    "task_sets.sums.order=curriculum",
    "task_sets.sums.curriculum=tools.experience.savings:uncertain",
    "dataset.path=''",
)
WAYS: Mapping[str, Sequence[str]] = {
    "all": (),
    "fewer": ("dataset.train_bs_n_seqs=38",),
    "replay": (*_REPLAY, "experience.replay.max_age=4"),
    "curriculum": _BY_SUCCESS,
}
"""Way -> what it changes of demo-ppo.yaml. all: 64 new prompts a step. fewer: 38. replay: 38, and 25 of earlier steps.
curriculum: 64, those first whose answers were right about as often as wrong."""
_COLORS = ("#2a78d6", "#888888", "#eb6834", "#2e9e5b")


class Result(TypedDict):
    """A run."""

    way: str
    seed: int
    sampled: list[float]
    """Tokens that were sampled until each evaluation."""
    accuracy: list[float]
    """On the held-out problems, at each evaluation; the first one is of the start."""


def uncertain(candidates: Sequence[Candidate]) -> Sequence[float]:
    """Score rows: those first whose answers are right about as often as wrong, or that have no answers yet."""
    middle = (RIGHT + WRONG) / 2
    return [0.0 if c.success is None else -abs(c.success - middle) for c in candidates]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the runs that are missing, and show all; return the exit code."""
    parser = parser_of("tools.experience.savings", __doc__)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", nargs="*", type=seed, default=[], help="none: show what is measured already")
    parser.add_argument("--steps", type=integer(least=1), default=300, help="PPO steps (default: 300)")
    parser.add_argument("--gpus", type=int, choices=sorted(PLACES), default=0, help="as in tools.demo")
    parser.add_argument("--output", type=Path, default=Path("runs/savings"), help="folder of the runs")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw accuracy against sampled tokens")
    given = parser.parse_args(argv)
    hide_progress_bars()
    output = given.output.absolute()
    file = output / "results.jsonl"
    for number in given.seeds:
        done = {row["way"] for row in _results(file) if row["seed"] == number}
        for way in given.ways:
            if way not in done:
                result = measure(way, output, seed=number, steps=given.steps, gpus=given.gpus)
                with file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(result) + "\n")
    results = _results(file)
    Console(width=120).print(table(results))
    if given.picture is not None:
        draw(results, given.picture)
    return 0


def _results(file: Path) -> list[Result]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def measure(way: str, output: Path, *, seed: int, steps: int, gpus: int) -> Result:
    """Train one way of one seed, after its warm-up. Raises DemoError where a run fails."""
    folder = output / str(seed)
    start = _warm_up(folder, seed=seed, gpus=gpus)
    environment = {"SLIPSTREAM_DEMO": str(folder)}
    run_quickstart(
        "ppo-math", *ppo_changes(start, seed=seed, gpus=gpus, steps=steps), *WAYS[way], f"trial_name={way}",
        f"exp_ctrl.eval_freq_steps={max(1, steps // 12)}",
        "exp_ctrl.save_freq_steps=null", log=folder / f"{way}.log",
        environment=environment,
    )  # fmt: skip
    (metrics,) = folder.glob(f"logs/*/demo-ppo/{way}/metrics.jsonl")
    rows = read_rows(metrics)
    trained = [row for row in rows if "n_tokens" in row]
    sampled = [0.0, *accumulate(row["n_tokens"] * (1.0 - row.get("replay/share", 0.0)) for row in trained)]
    evaluated = [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
    return Result(
        way=way,
        seed=seed,
        sampled=[sampled[int(step)] for step, _ in evaluated],
        accuracy=[found for _, found in evaluated],
    )


def _warm_up(folder: Path, *, seed: int, gpus: int) -> Path:
    """Return the model of the warm-up; run it where it is missing."""
    chosen = folder / "warm-up.txt"
    if not chosen.exists():
        files = make_demo_data(folder, seed=seed)
        environment = {"SLIPSTREAM_DEMO": str(folder)}
        run_quickstart("sft", f"seed={seed}", *PLACES[gpus][0], log=folder / "sft.log", environment=environment)
        measured = partial(accuracy, data=files.held_out)
        model, _ = first_at_least(saved_models(folder, "demo-sft"), WARM_UP_TARGET, measured)
        chosen.write_text(str(model))
    return Path(chosen.read_text())


def table(results: Sequence[Result]) -> Table:
    """Return sampled tokens and last accuracy of each way, over its seeds."""
    made = Table("way", "seeds", "sampled tokens", "accuracy before", "after", "standard deviation", "of each seed")
    for way in WAYS:
        runs = sorted((run for run in results if run["way"] == way), key=lambda run: run["seed"])
        if runs:
            last = [run["accuracy"][-1] for run in runs]
            spread = f"{100 * stdev(last):.1f}" if len(last) > 1 else ""
            made.add_row(
                way, " ".join(str(run["seed"]) for run in runs), f"{mean(r['sampled'][-1] for r in runs) / 1000:.0f} k",
                f"{mean(run['accuracy'][0] for run in runs):.1%}", f"{mean(last):.1%}", spread,
                " ".join(f"{100 * value:.1f}" for value in last),
            )  # fmt: skip
    return made


def draw(results: Sequence[Result], picture: Path) -> None:
    """Write a PNG: a thin line for each run, a thick one for the mean of a way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.2))
    for color, way in zip(_COLORS, WAYS, strict=True):
        runs = [run for run in results if run["way"] == way]
        for run in runs:
            axes.plot([n / 1000 for n in run["sampled"]], run["accuracy"], color=color, linewidth=0.6, alpha=0.5)
        if runs:
            sampled = [mean(values) / 1000 for values in zip(*(run["sampled"] for run in runs), strict=True)]
            right = [mean(values) for values in zip(*(run["accuracy"] for run in runs), strict=True)]
            axes.plot(sampled, right, color=color, linewidth=2, label=f"{way}, {len(runs)} seeds")
    axes.set_xlabel("sampled tokens, thousands")
    axes.set_ylabel("held-out accuracy")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
