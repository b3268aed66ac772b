"""Train with tokens of different ages and different corrections from one warm-up: a table and a picture.

    python -m tools.atlas --output DIR [--staleness 0 1 2 4 8] [--methods decoupled tis] [--seeds 1 2 3] [--jobs 4]

Each run is `python -m core.quickstart` on two-digit additions (see tools/learning.py) with staleness.max_staleness and
one correction; the table shows the mean age that the tokens had. A run takes two cores; --jobs of them run at a time.
What has a row in DIR/rows is not repeated. Writes DIR/rows/*.json, DIR/atlas.md and DIR/atlas.png; the exit status is 1
if a run failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.arguments import integer
from tools.sweep.command import run_sweep, sweep_parser
from tools.sweep.figures import draw_by_staleness, shown
from tools.sweep.runs import Run, read_all

STALENESS = (0, 1, 2, 4, 8)
METHODS: Mapping[str, Mapping[str, Any]] = {
    "none": {"algorithm.name": "grpo", "algorithm.correction": "none"},
    "decoupled": {"algorithm.name": "grpo", "algorithm.correction": "decoupled"},
    "loglinear": {
        "algorithm.name": "grpo", "algorithm.correction": "decoupled", "algorithm.proximal": "loglinear",
    },
    "tis": {"algorithm.name": "grpo", "algorithm.correction": "tis"},
    "icepop": {"algorithm.name": "grpo", "algorithm.correction": "icepop"},
    "cispo": {"algorithm.name": "cispo", "algorithm.correction": "bypass"},
    "gspo": {"algorithm.name": "gspo", "algorithm.correction": "bypass"},
}  # fmt: skip
"""none: clipped PPO on group advantages, whose ratios are to the recomputed policy. cispo and gspo take their ratios to
the policy that sampled."""
UNNEEDED = {("loglinear", 0): "decoupled"}
"""(method, staleness) that a run refuses because it is the same as another method."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: 1 where a run failed."""
    parser = sweep_parser("tools.atlas", str(__doc__))
    parser.add_argument("--staleness", nargs="+", type=integer(least=0), default=STALENESS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=tuple(METHODS))
    return run_sweep(parser, arguments, make_runs, report)


def make_runs(given: argparse.Namespace, model: Path) -> list[Run]:
    """Make the runs of the arguments."""
    return [
        make_run(method, staleness, seed)
        for seed in given.seeds
        for staleness in given.staleness
        for method in given.methods
        if (method, staleness) not in UNNEEDED
    ]


def make_run(method: str, staleness: int, seed: int) -> Run:
    """Make the run of a method at one staleness."""
    changes = {**METHODS[method], "staleness.max_staleness": staleness}
    return Run(labels={"method": method, "staleness": staleness, "seed": seed}, changes=changes)


def report(folder: Path) -> None:
    """Write table and picture of the rows that are there."""
    rows = read_all(folder)
    if not rows:
        return
    (folder / "atlas.md").write_text(text := table(rows) + "\n", encoding="utf-8")
    print(text)
    points = {
        method: {s: [row["accuracies"][-1] for row in found] for s in levels(rows) if (found := of(rows, method, s))}
        for method in METHODS
    }
    draw_by_staleness(
        folder / "atlas.png", {method: by for method, by in points.items() if by},
        title=f"Two-digit additions, 0.9M parameters, {rows[0]['steps']} steps: mean over seeds, 95 % interval",
    )  # fmt: skip


def of(rows: Sequence[dict[str, Any]], method: str, staleness: int) -> list[dict[str, Any]]:
    """Return the rows of a method at one staleness, one a seed."""
    method = UNNEEDED.get((method, staleness), method)
    return [row for row in rows if (row["method"], row["staleness"]) == (method, staleness)]


def levels(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Return the values of staleness that have rows."""
    return sorted({row["staleness"] for row in rows})


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Write held-out accuracies at the end as markdown: mean and 95 % confidence interval over seeds."""
    columns = levels(rows)
    lines = ["| method | " + " | ".join(f"staleness {s}" for s in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for method in METHODS:
        cells = [shown([r["accuracies"][-1] for r in found], percent=True) if (found := of(rows, method, s)) else "—"
                 for s in columns]  # fmt: skip
        lines.append(f"| {method} | {' | '.join(cells)} |")
    ages = [[row["age"] for row in rows if row["staleness"] == s] for s in columns]
    lines.append("| mean age of tokens, steps | " + " | ".join(f"{sum(a) / len(a):.2f}" for a in ages) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
