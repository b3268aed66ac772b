"""Tables and pictures of sweeps: means over seeds with 95 % confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STUDENT = (math.nan, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Quantile 0.975 of Student's t with 0, 1, 2 ... degrees of freedom."""
COLORS = ("#2a78d6", "#eb6834", "#2e9e5b", "#8c52c6", "#c9a227", "#d6457f", "#4b4b4b", "#3fb1b5")
GRID = "#dddddd"


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % confidence interval (Student's t); NaN with one value."""
    if len(values) < 2:
        return statistics.fmean(values), math.nan
    half = _quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


def _quantile(freedom: int) -> float:
    """Return the quantile 0.975 of Student's t to 0.005; beyond the table by its expansion around the normal one
    (Abramowitz and Stegun, 26.7.5)."""
    if freedom < len(STUDENT):
        return STUDENT[freedom]
    z = 1.96
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def shown(values: Sequence[float], *, percent: bool = False) -> str:
    """Return "mean ± interval"."""
    mean, half = mean_and_interval(values)
    scale, digits, unit = (100.0, 1, " %") if percent else (1.0, 0, "")
    interval = "" if math.isnan(half) else f" ± {scale * half:.{digits}f}"
    return f"{scale * mean:.{digits}f}{interval}{unit}"


def seconds_to(row: Mapping[str, Any], target: float) -> float | None:
    """Return the seconds of training until an evaluation reached `target`; None where none did."""
    reached = [s for s, a in zip(row["eval_seconds"], row["accuracies"], strict=True) if a >= target]
    return reached[0] if reached else None


def curve(rows: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float], list[float]]:
    """Return steps, mean accuracies and half intervals of rows of different seeds."""
    shortest = min(rows, key=lambda row: len(row["eval_steps"]))
    points = [mean_and_interval([row["accuracies"][i] for row in rows]) for i in range(len(shortest["eval_steps"]))]
    return (
        shortest["eval_steps"],
        [mean for mean, _ in points],
        [0.0 if math.isnan(half) else half for _, half in points],
    )


def draw_curves(path: Path, groups: Mapping[str, Sequence[Mapping[str, Any]]], *, title: str) -> None:
    """Write a PNG of small pictures on one scale: the held-out accuracy of each group by step, with its interval, over
    the means of the others in grey."""
    plt = _pyplot()
    columns = min(5, len(groups))
    lines = math.ceil(len(groups) / columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(2.3 * columns, 1.9 * lines + 0.6), sharex=True, sharey=True, squeeze=False
    )
    curves = {name: curve(rows) for name, rows in groups.items()}
    for axis, (name, (steps, means, halves)) in zip(axes.flat, curves.items(), strict=False):
        for other_steps, other, _ in curves.values():
            axis.plot(other_steps, other, color=GRID, linewidth=0.8, zorder=1)
        low, high = ([m + sign * h for m, h in zip(means, halves, strict=True)] for sign in (-1, 1))
        axis.fill_between(steps, low, high, color=COLORS[0], alpha=0.2, linewidth=0, zorder=2)
        axis.plot(steps, means, color=COLORS[0], linewidth=1.8, zorder=3)
        axis.set_title(name, fontsize=9)
        axis.set_ylim(0, 1.02)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes.flat)[len(curves) :]:
        axis.set_visible(False)
    figure.supxlabel("training step", fontsize=9)
    figure.supylabel("held-out accuracy", fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_by_staleness(path: Path, points: Mapping[str, Mapping[int, Sequence[float]]], *, title: str) -> None:
    """Write a PNG: accuracies (one a seed) by staleness, a line and 95 % intervals for each method."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7.5, 4.2))
    places = {s: i for i, s in enumerate(sorted({s for by in points.values() for s in by}))}
    for i, (name, by) in enumerate(points.items()):
        shift = (i - (len(points) - 1) / 2) * 0.07  # intervals of one staleness stand beside each other
        found = [(places[s] + shift, *mean_and_interval(values)) for s, values in sorted(by.items())]
        axis.errorbar(
            [x for x, _, _ in found], [mean for _, mean, _ in found],
            yerr=[0.0 if math.isnan(half) else half for _, _, half in found],
            label=name, color=COLORS[i % len(COLORS)], marker="o", markersize=4, linewidth=1.4, capsize=2,
        )  # fmt: skip
    axis.set_xticks(list(places.values()), [str(s) for s in places])
    axis.set_xlabel("staleness.max_staleness")
    axis.set_ylabel("held-out accuracy at the end")
    axis.grid(axis="y", color=GRID, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, ncols=2)
    axis.set_title(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
