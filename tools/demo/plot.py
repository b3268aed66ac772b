"""The demo's picture: training reward and held-out accuracy over the steps of the reinforcement learning.

Of any other run:

    python -m tools.demo.plot FILEROOT/logs/USER/EXPERIMENT/TRIAL/metrics.jsonl --output curve.png --title "What it is"
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from core.monitoring.metrics import read_rows
from rollout.rewards.math import RIGHT, WRONG
from tools import arguments as cli

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REWARD, ACCURACY, GREY = "#2a78d6", "#eb6834", "#666666"
_SMOOTHED_STEPS = 10
_LABEL_HEIGHT = 0.12
"""Height of a label of two lines on the vertical axis, which ends at 1.08."""


def draw_run(picture: Path, metrics: Path, *, title: str, others: Sequence[Path] = ()) -> None:
    """Write a PNG of a PPO run's metrics.jsonl; its rewards are those of the math reward, RIGHT or WRONG. Of `others`,
    metrics of other seeds, only the accuracies are drawn. Raises ValueError where a file has no step or no
    evaluation."""
    trained, evaluated = _rows(metrics)
    draw_reward_curve(
        picture,
        steps=[int(row["step"]) for row in trained],
        rewards=[(row["task_reward"] - WRONG) / (RIGHT - WRONG) for row in trained],
        eval_steps=[int(row["step"]) for row in evaluated],
        accuracies=[row["eval/accuracy"] for row in evaluated],
        title=title,
        others=[[(row["step"], row["eval/accuracy"]) for row in _rows(other)[1]] for other in others],
    )


def _rows(metrics: Path) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Return the rows of steps and those of evaluations."""
    try:
        rows = read_rows(metrics)
    except ValueError as error:
        raise ValueError(f"{metrics}: no metrics.jsonl of a run ({error})") from error
    trained = [row for row in rows if "task_reward" in row]
    evaluated = [row for row in rows if "eval/accuracy" in row]
    if not trained or not evaluated:
        raise ValueError(f"{metrics}: {len(trained)} steps and {len(evaluated)} evaluations; one of each is needed")
    return trained, evaluated


def draw_reward_curve(
    path: Path,
    *,
    steps: Sequence[int],
    rewards: Sequence[float],
    eval_steps: Sequence[int],
    accuracies: Sequence[float],
    title: str,
    others: Sequence[Sequence[tuple[float, float]]] = (),
) -> None:
    """Write a PNG. Rewards and accuracies are fractions; each reward is a step's mean over sampled answers. `others`
    are accuracies of other seeds, as (step, accuracy)."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(8, 4.5), dpi=150)
    axes = figure.subplots()
    axes.plot(steps, rewards, color=REWARD, alpha=0.25, linewidth=1)
    axes.plot(steps, moving_mean(rewards), color=REWARD, linewidth=2)
    axes.plot(eval_steps, accuracies, color=ACCURACY, linewidth=2, marker="o", markersize=5)
    for other in others:
        axes.plot(*zip(*other, strict=True), color=ACCURACY, linewidth=1, marker="o", markersize=3, alpha=0.7)
    last = max(*steps, *eval_steps)
    reward = moving_mean(rewards)[-1]
    middle, apart = (accuracies[-1] + reward) / 2, max(abs(accuracies[-1] - reward), _LABEL_HEIGHT) / 2
    apart = apart if accuracies[-1] >= reward else -apart
    label(axes, last, middle + apart, "held-out accuracy\n(greedy)", ACCURACY)
    label(axes, last, middle - apart, "training reward\n(sampled)", REWARD)
    for step, value, side in ((eval_steps[0], accuracies[0], "left"), (eval_steps[-1], accuracies[-1], "right")):
        axes.annotate(
            f"{value:.0%}",
            (step, value),
            xytext=(0, 9),
            textcoords="offset points",
            ha=side,
            color=ACCURACY,
            fontweight="bold",
        )
    axes.set_xlim(0, last)
    axes.set_ylim(0, 1.08)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    draw_horizontal_lines(axes)
    axes.tick_params(colors=GREY)
    axes.set_xlabel("step", color=GREY)
    axes.set_title(title, loc="left", fontsize=11)
    figure.subplots_adjust(left=0.08, right=0.8, top=0.9, bottom=0.13)
    figure.savefig(path)


def draw_horizontal_lines(axes: Axes) -> None:
    """Draw lines behind the values in place of the frame and the marks at its sides."""
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)


def label(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    """Return a line's name at its right end, which needs no legend."""
    axes.annotate(
        text, (x, y), xytext=(8, 0), textcoords="offset points", va="center", color=color, annotation_clip=False
    )


def moving_mean(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and up to 9 before it."""
    windows = [values[max(0, i + 1 - _SMOOTHED_STEPS) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def main() -> int:
    """Draw the curve; 2 for a file that is none of a run."""
    parser = cli.parser_of("tools.demo.plot", __doc__)
    parser.add_argument("metrics", type=cli.data_file, help="metrics.jsonl of a PPO run that evaluates")
    parser.add_argument(
        "--others",
        type=cli.data_file,
        nargs="+",
        default=[],
        help="metrics.jsonl of other seeds: their accuracies as thin lines",
    )
    parser.add_argument("--output", type=Path, required=True, help="PNG to write")
    parser.add_argument("--title", default="", help="text above the picture")
    arguments = parser.parse_args()
    try:
        draw_run(arguments.output, arguments.metrics, title=arguments.title, others=arguments.others)
    except (OSError, ValueError) as error:
        return cli.refused(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
