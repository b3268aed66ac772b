"""Measures what Slipstream promises, each figure beside its baseline in the same run.

    python -m tools.bench cpu [--trl-python /path/to/trl-env/bin/python] [--only update rollout]

Writes benchmarks/{host}-{date}.json, a list of rows {name, value, unit, baseline, ratio, target, command, versions},
and prints the same as a markdown table. TRL is measured in an environment of its own, and left out without one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from tools import bench_cpu

PACKAGES = ("torch", "megatron-core", "ray", "transformers")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure. `ratio` is value / baseline; `target` is what was promised, as text."""

    name: str
    value: float
    unit: str
    baseline: float | None
    ratio: float | None
    target: str
    command: str
    versions: dict[str, str]


MEASUREMENTS: dict[str, Callable[[bench_cpu.Scene], Iterator[bench_cpu.Figure]]] = {
    "allocation": bench_cpu.allocation,
    "config": bench_cpu.dry_run,
    "update": bench_cpu.train_step,
    "rollout": bench_cpu.generator,
    "producer": bench_cpu.producer,
    "async": bench_cpu.sync_and_async,
    "loop": bench_cpu.loop,
    "memory": bench_cpu.memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=["cpu"], help="what to measure on")
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    parser.add_argument("--trl-python", type=Path, help="interpreter of an environment that has trl")
    parser.add_argument("--output", type=Path, default=Path("benchmarks"))
    given = parser.parse_args()
    command = "python -m tools.bench cpu" + (" --trl-python ..." if given.trl_python else "")
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        scene = bench_cpu.Scene(folder=Path(folder), trl_python=given.trl_python)
        for name in given.only:
            for figure in MEASUREMENTS[name](scene):
                ratio = figure.value / figure.baseline if figure.baseline else None
                rows.append(Row(**asdict(figure), ratio=ratio, command=command, versions=versions))
                print(line(rows[-1]), flush=True)
    given.output.mkdir(exist_ok=True)
    path = given.output / f"cpu-{os.cpu_count()}core-{date.today().isoformat()}.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(f"\n{path}\n\n| figure | value | baseline | ratio | target |\n|---|---|---|---|---|")
    for row in rows:
        print(line(row))


def line(row: Row) -> str:
    """One row of the markdown table."""
    baseline = "" if row.baseline is None else f"{row.baseline:,.4g}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return f"| {row.name} | {row.value:,.4g} {row.unit} | {baseline} | {ratio} | {row.target} |"


if __name__ == "__main__":
    main()
