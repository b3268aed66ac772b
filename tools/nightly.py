"""Run what continuous integration leaves out, one part after the other, and print a table of results and durations.

    python -m tools.nightly                          # all parts
    python -m tools.nightly --parts chaos mutants

Every layout of every model family, whole runs in new interpreters, the live SGLang suites where SLIPSTREAM_SGLANG_ENV
is set, 50 kills of a run, and the catalogue of bugs. Exit code 1: a part failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
SGLANG_ENV = "SLIPSTREAM_SGLANG_ENV"
LIVE_SUITES = (
    "tests/rollout/inference/sglang",
    "tests/core/experiments/test_ppo_sglang.py",
    "tests/tools/test_eval_sglang.py",
)

WHOLE_RUNS = ("tests/core/experiments", "tests/core/processes/test_attempts.py", "tests/core/recovery")
FRESH = "SLIPSTREAM_TEST_FRESH"
"""Set: tests start whole runs in new interpreters, not as forks of one that has imported the libraries."""

_SIDE_BY_SIDE = max(1, (os.cpu_count() or 1) // 8)
"""Test processes: a layout has up to eight ranks."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One command of the nightly run."""

    name: str
    arguments: tuple[str, ...]
    """Arguments of the Python interpreter."""
    needs: str | None = None
    """Environment variable without which the part is left out."""
    sets: str | None = None
    """Environment variable that is 1 for the part."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one part."""

    name: str
    result: str
    failed: bool
    seconds: float | None


PARTS = (
    Part(name="layouts", arguments=("-m", "pytest", "-m", "nightly", "-n", str(_SIDE_BY_SIDE), "--dist", "loadfile")),
    Part(name="fresh", arguments=("-m", "pytest", "-n", "0", *WHOLE_RUNS), sets=FRESH),
    Part(name="sglang", arguments=("-m", "pytest", "-n", "0", *LIVE_SUITES), needs=SGLANG_ENV),
    Part(name="chaos", arguments=("-m", "tools.chaos", "--kills", "50", "--seed", "7")),
    Part(name="mutants", arguments=("-m", "tools.mutants")),
)


def run_part(part: Part, console: Console) -> Outcome:
    """Run the command of a part; its output goes to this process's terminal."""
    if part.needs is not None and not os.environ.get(part.needs):
        console.print(f"{part.name}: left out, {part.needs} is not set", soft_wrap=True)
        return Outcome(name=part.name, result=f"left out: {part.needs} is not set", failed=False, seconds=None)
    console.rule(part.name)
    start, last = time.monotonic(), ""
    command = [sys.executable, *part.arguments]
    env = os.environ | {"PYTHONUNBUFFERED": "1"} | ({part.sets: "1"} if part.sets else {})
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None, "stdout is a pipe"
        for line in process.stdout:
            sys.stdout.write(line)
            last = line.strip() or last
    code, seconds = process.returncode, time.monotonic() - start
    result = last.strip("= ") if code == 0 else f"failed with exit code {code}: {last.strip('= ')}"
    return Outcome(name=part.name, result=result, failed=code != 0, seconds=seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.nightly", description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="only these (default: all)")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, markup=False)
    outcomes = [run_part(part, console) for part in PARTS if not options.parts or part.name in options.parts]
    table = Table("part", "result", title="Nightly", title_justify="left")
    table.add_column("minutes", justify="right")
    for outcome in outcomes:
        minutes = "-" if outcome.seconds is None else f"{outcome.seconds / 60:.1f}"
        table.add_row(outcome.name, outcome.result, minutes)
    console.print(table)
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
