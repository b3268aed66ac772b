"""The command line that sweeps share: arguments, warm-up, runs, report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.arguments import integer, new_folder, program
from tools.arguments import seed as seed_argument
from tools.sweep.runs import Run, read_keys, run_all
from tools.sweep.warm import warm_up


def sweep_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that every sweep has, for `python -m MODULE`."""
    parser = argparse.ArgumentParser(
        prog=program(module), description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=new_folder, required=True, help="folder of the sweep; rows in it are kept")
    parser.add_argument("--seeds", nargs="+", type=seed_argument, default=[1, 2, 3])
    parser.add_argument("--steps", type=integer(least=1), default=300, help="training steps of a run")
    parser.add_argument("--jobs", type=integer(least=1), default=1, help="runs at a time, two cores each")
    parser.add_argument("--busy", action="store_true", help="other work runs on this host: do not count its seconds")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys that change in every run")
    return parser


def run_sweep(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    make_runs: Callable[[argparse.Namespace, Path], list[Run]],
    report: Callable[[Path], None],
) -> int:
    """Parse the arguments, run what `make_runs(given, model of the warm-up)` returns, and report the folder. Returns 1
    where a run failed."""
    given = parser.parse_args(arguments)
    try:
        keys = read_keys(given.set)
    except ValueError as error:
        parser.error(str(error))
    folder = given.output.absolute()
    warm = folder / "warm"
    model = warm_up(warm)
    runs = make_runs(given, model)
    failed = run_all(
        runs, folder, warm=warm, model=model, steps=given.steps, jobs=given.jobs, busy=given.busy, given=keys
    )
    report(folder)
    for message in failed:
        print(message, file=sys.stderr)
    return 1 if failed else 0
