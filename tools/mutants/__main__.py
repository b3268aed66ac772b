"""Break promises to users on purpose, one at a time in a copy of the source, and run the tests that must notice.

    python -m tools.mutants                              # every promise of tests/mutants.toml
    python -m tools.mutants --area core/algorithms       # those of one file or folder
    python -m tools.mutants --changed main               # mutate the lines that differ from main with cosmic-ray

A bug is killed when its tests pass without it and fail with it. Exit code 1: a survivor, tests that do not pass without
the bug, or fewer than 95 % killed. Entries whose text has left the source are listed and count as not killed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tools.mutants import catalogue
from tools.mutants.catalogue import CatalogueError, Mutant
from tools.mutants.changed import changed_files, mutate
from tools.mutants.trial import Verdict, copy_tree, run_tests, try_mutant

ROOT = Path(__file__).resolve().parents[2]
LEAST_SCORE = 0.95


def try_promises(mutants: Sequence[Mutant], tree: Path, limit_seconds: float) -> list[Verdict]:
    """Try the bug of every entry in turn. Tests run without a bug first, once for each selection."""
    baselines = {}
    verdicts = []
    for i, mutant in enumerate(mutants):
        start = time.monotonic()
        if mutant.tests not in baselines and not mutant.missing(tree):
            baselines[mutant.tests] = run_tests(mutant.tests, tree, limit_seconds)
        baseline = baselines.get(mutant.tests)
        if baseline is not None and not baseline.passed:
            detail = f"its tests do not pass without the bug (exit code {baseline.code}):\n{baseline.tail}"
            verdict = Verdict(mutant=mutant, outcome="error", detail=detail)
        else:
            verdict = try_mutant(mutant, tree, limit_seconds=limit_seconds)
        verdicts.append(verdict)
        print(
            f"[{i + 1}/{len(mutants)}] {verdict.outcome} in {time.monotonic() - start:.0f} s: {mutant.id}", flush=True
        )
    return verdicts


def report(verdicts: Sequence[Verdict]) -> int:
    """Print what was not killed and the score. Return the exit code."""
    for verdict in verdicts:
        if verdict.outcome != "killed":
            print(f"{verdict.outcome}: {verdict.mutant.id}: {verdict.mutant.promise} {verdict.detail}")
    killed = sum(verdict.outcome == "killed" for verdict in verdicts)
    print(f"{killed} of {len(verdicts)} bugs killed ({killed / len(verdicts):.1%})")
    failed = any(verdict.outcome in ("survived", "error") for verdict in verdicts)
    return int(failed or killed < LEAST_SCORE * len(verdicts))


def try_changes(branch: str, tree: Path, limit_seconds: float) -> int:
    """Mutate the lines that differ from `branch` and print the survivors. Return the exit code."""
    total = survived = 0
    for file in changed_files(ROOT, branch):
        print(f"mutating {file}", flush=True)
        tried, survivors = mutate(file, ROOT, tree, branch=branch, limit_seconds=limit_seconds)
        print("\n".join(survivors))
        total, survived = total + tried, survived + len(survivors)
    print(f"{total - survived} of {total} mutants of the lines that differ from {branch} killed")
    return int(survived > 0)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tools.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--ids", nargs="+", default=[], metavar="PATTERN", help="only entries with such ids")
    parser.add_argument("--area", nargs="+", default=[], metavar="PATTERN", help="only files that begin like this")
    parser.add_argument("--changed", metavar="BRANCH", help="mutate the lines that differ from this branch instead")
    parser.add_argument("--timeout", type=float, default=240.0, metavar="SECONDS", help="limit of one bug's tests")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        mutants = catalogue.select(catalogue.load(ROOT), ids=options.ids, areas=options.area)
        if not mutants:
            raise CatalogueError("no entry matches --ids and --area")
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            tree = copy_tree(ROOT, Path(folder) / "tree")
            if options.changed:
                return try_changes(options.changed, tree, options.timeout)
            return report(try_promises(mutants, tree, options.timeout))
    except CatalogueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
