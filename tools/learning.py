"""Train every policy-gradient preset from one warm-up on two-digit additions: a table and a picture.

    python -m tools.learning --output DIR [--presets grpo dapo] [--seeds 1 2 3] [--steps 300] [--jobs 4]

Each run is `python -m core.quickstart` with the preset and nothing else changed: 0.9M parameters, 64 prompts of 8
answers a step in two updates, generators up to two steps ahead. A run takes two cores; --jobs of them run at a time.
What has a row in DIR/rows is not repeated. Rows of several hosts can be put together: the seconds in the table are
those of the first one that was not --busy. Writes DIR/rows/*.json, DIR/learning.md and DIR/learning.png; the exit
status is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from core.algorithms import PRESETS
from tools.sweep.command import run_sweep, sweep_parser
from tools.sweep.figures import draw_curves, seconds_to, shown
from tools.sweep.runs import Run, read_all

TARGET = 0.7
"""Share of the held-out problems whose time is in the table."""
CRITIC: Mapping[str, Any] = {
    "critic.init_critic_from_actor": "true", "critic.optimizer.lr": 2e-4,
    "critic.optimizer.weight_decay": 0, "critic.optimizer.eps": "1e-8",
}  # fmt: skip
"""What `ppo` needs besides its name; critic.path is that of the actor."""
OTHER_DATA = frozenset({"mix", "chord"})
"""Presets that learn from other data than rollouts alone."""
NAMES = tuple(name for name in PRESETS if name not in OTHER_DATA)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: 1 where a run failed."""
    parser = sweep_parser("tools.learning", str(__doc__))
    parser.add_argument("--presets", nargs="+", choices=NAMES, default=NAMES)
    return run_sweep(parser, arguments, make_runs, report)


def make_runs(given: argparse.Namespace, model: Path) -> list[Run]:
    """Make the runs of the arguments."""
    return [make_run(name, seed, model) for seed in given.seeds for name in given.presets]


def make_run(name: str, seed: int, model: Path) -> Run:
    """Make the run of a preset."""
    changes = {"algorithm.name": name, **({**CRITIC, "critic.path": str(model)} if name == "ppo" else {})}
    return Run(labels={"preset": name, "seed": seed}, changes=changes)


def report(folder: Path) -> None:
    """Write table and picture of the rows that are there."""
    groups = by_preset(read_all(folder))
    if not groups:
        return
    (folder / "learning.md").write_text(text := table(groups) + "\n", encoding="utf-8")
    print(text)
    draw_curves(
        folder / "learning.png", groups, title="Two-digit additions, 0.9M parameters: mean over seeds, 95 % interval"
    )


def by_preset(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each preset in the order of PRESETS."""
    groups = {name: [row for row in rows if row["preset"] == name] for name in NAMES}
    return {name: found for name, found in groups.items() if found}


def table(groups: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """Write the table as markdown: mean and 95 % confidence interval over seeds."""
    host = next((row["host"] for rows in groups.values() for row in rows if row["host"]), None)
    lines = [
        f"| preset | seeds | steps | held-out accuracy at the end | best | steps to {TARGET:.0%} | seconds to "
        f"{TARGET:.0%} | seconds a step | tokens clipped |",
        "|---" * 9 + "|",
    ]
    for name, rows in groups.items():
        steps = [row["eval_steps"][i] for row in rows if (i := first_at(row)) is not None]
        timed = [row for row in rows if row["host"] == host]
        seconds = [value for row in timed if (value := seconds_to(row, TARGET)) is not None]
        reached = "" if len(steps) == len(rows) else f" ({len(steps)} of {len(rows)} seeds)"
        cells = (
            f"`{name}`", str(len(rows)), str(rows[0]["steps"]),
            shown([r["accuracies"][-1] for r in rows], percent=True),
            shown([max(r["accuracies"]) for r in rows], percent=True),
            shown(steps) + reached if steps else "—", shown(seconds) if seconds else "—",
            f"{fmean(r['seconds'] / r['steps'] for r in timed):.3f}" if timed else "—",
            f"{sum(r['clip_ratio'] for r in rows) / len(rows):.1%}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    if host is not None:
        lines += ["", f"Seconds are those of one host: {host}."]
    return "\n".join(lines)


def first_at(row: Mapping[str, Any]) -> int | None:
    """Return the index of the first evaluation that reached TARGET."""
    return next((i for i, accuracy in enumerate(row["accuracies"]) if accuracy >= TARGET), None)


if __name__ == "__main__":
    sys.exit(main())
