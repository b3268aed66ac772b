"""The picture of `fp8_learning` or `fp8_rounded`: held-out accuracy by step with FP8, and with bfloat16.

Of the rows in a file:

    python -m tools.bench.fp8.picture benchmarks/HOST-DATE.json --output curve.png
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from tools import arguments as cli
from tools.bench.fp8 import rounded
from tools.bench.fp8.learning import Size
from tools.demo_plot import GREY, draw_horizontal_lines

SIDES = {
    "fp8.sums_rounded": ("weights rounded to FP8", "#2a78d6"),
    "fp8.sums_both_ends": ("FP8 at both ends", "#eb6834"),
    "fp8.sums": ("FP8 server", "#2a78d6"),
}
"""Name of a measurement -> label and color of its values; their baselines are bfloat16's."""
BASELINE = ("bfloat16", GREY)
ROUNDED = SIDES["fp8.sums_rounded"]
_ROW = re.compile(rf"({'|'.join(SIDES)})_accuracy_after_(\d+)_steps")


def curves(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Return (label, color) -> (step, accuracy) of every evaluation, in the order of the steps. Raises ValueError
    where the rows have none, or those of both measurements."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if (match := _ROW.fullmatch(row["name"])) is None:
            continue
        name, step = match[1], int(match[2])
        found.setdefault(SIDES[name], {})[step] = row["value"]
        if row["baseline"] is not None:
            found.setdefault(BASELINE, {})[step] = row["baseline"]
    if not found:
        raise ValueError("no rows of fp8_learning or fp8_rounded")
    if ROUNDED in found and len(found) > 2:
        raise ValueError("rows of fp8_learning and of fp8_rounded; their baselines differ, so keep those of one")
    return {side: sorted(values.items()) for side, values in found.items()}


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a PNG. Bars are the standard error of a mean over the seeds' held-out problems."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter

    found = curves(rows)
    size = rounded.SIZE if ROUNDED in found else Size()
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150)
    for number, ((label, color), points) in enumerate(found.items()):
        steps, values = zip(*points, strict=True)
        errors = [math.sqrt(value * (1 - value) / (size.held_out * len(size.seeds))) for value in values]
        places = [step + 0.009 * max(steps) * (number - 1) for step in steps]  # so that no bar hides another
        axes.errorbar(
            places, values, errors, color=color, label=label, linewidth=2, marker="o", markersize=5, capsize=3
        )
    every = [value for points in found.values() for _, value in points]
    axes.set_ylim(min(every) - 0.08, max(every) + 0.1)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    draw_horizontal_lines(axes)
    axes.tick_params(colors=GREY)
    axes.set_xlabel("GRPO step", color=GREY)
    axes.set_title(f"Held-out accuracy, means of {len(size.seeds)} seeds", loc="left", fontsize=11)
    axes.legend(frameon=False, loc="upper left")
    figure.subplots_adjust(left=0.08, right=0.97, top=0.9, bottom=0.13)
    figure.savefig(path)
    plt.close(figure)


def main() -> int:
    """Draw the picture; 2 for a file without such rows."""
    parser = argparse.ArgumentParser(
        prog=cli.program("tools.bench.fp8.picture"), description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("rows", type=cli.data_file, help="file of benchmarks/")
    parser.add_argument("--output", type=Path, required=True, help="PNG to write")
    given = parser.parse_args()
    try:
        draw(given.output, json.loads(given.rows.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        print(f"error: {given.rows}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
