"""Put the bugs of tests/mutants.toml into copies of the source, one at a time, and run the tests that must notice.

    python -m tools.mutants                              # the whole catalogue, one copy for each core
    python -m tools.mutants --area core/trainer.py       # the bugs of one file or folder
    python -m tools.mutants --ids 'trainer-*' --workers 1
    python -m tools.mutants --sample 20 --seed 7 --quick

A bug is killed when its tests pass without it and fail with it. Exit code 1: an entry that cannot be run, a survivor
without a reason, or a score below 95 %.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from tools.mutants import catalogue
from tools.mutants.catalogue import CatalogueError, Mutant
from tools.mutants.copies import copy_tree
from tools.mutants.report import Display, problems, show, write_json
from tools.mutants.trial import TestRun, Tree, Verdict, try_mutant

ROOT = Path(__file__).resolve().parents[2]
Item = TypeVar("Item")
Result = TypeVar("Result")


class Copies(ExitStack):
    """Copies of the tree, each used by one job at a time. Use as a context manager."""

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__()
        self._free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        self._count = count
        for i in range(count):
            self._free.put(self.enter_context(Tree(copy_tree(ROOT, folder / f"tree{i}"))))

    def map(self, job: Callable[[Item, Tree], Result], items: Sequence[Item]) -> list[Result]:
        """Return job(item, copy) of every item."""

        def one(item: Item) -> Result:
            tree = self._free.get()
            try:
                return job(item, tree)
            finally:
                self._free.put(tree)

        with ThreadPoolExecutor(self._count) as pool:
            try:
                return list(pool.map(one, items))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def run_baselines(
    mutants: Sequence[Mutant], copies: Copies, display: Display, limit_seconds: float
) -> dict[tuple[str, ...], TestRun]:
    """Run every distinct selection of tests once, without a bug."""

    def job(tests: tuple[str, ...], tree: Tree) -> TestRun:
        run = tree.run(tests, limit_seconds)
        text = f"{'passed' if run.passed else 'NOT PASSED'} in {run.seconds:.1f} s without a bug: {' '.join(tests)}"
        display.done("tests without a bug", text, keep=not run.passed)
        return run

    selections = list(dict.fromkeys(mutant.tests for mutant in mutants))
    return dict(zip(selections, copies.map(job, selections), strict=True))


def run_mutants(
    mutants: Sequence[Mutant],
    baselines: dict[tuple[str, ...], TestRun] | None,
    copies: Copies,
    display: Display,
    limit_seconds: float,
) -> list[Verdict]:
    """Try every bug whose tests pass without it. Without baselines, the tests are taken to pass at once."""

    def job(mutant: Mutant, tree: Tree) -> Verdict:
        baseline = baselines[mutant.tests] if baselines is not None else None
        if baseline is not None and not baseline.passed:
            detail = f"its tests do not pass without the bug (exit code {baseline.code}):\n{baseline.tail}"
            verdict = Verdict(mutant=mutant, outcome="error", seconds=0.0, detail=detail)
        else:
            seconds = baseline.seconds if baseline is not None else 0.0
            verdict = try_mutant(mutant, tree, baseline_seconds=seconds, limit_seconds=limit_seconds)
        text = f"{verdict.outcome} in {verdict.seconds:.1f} s: {mutant.id} ({mutant.file})"
        display.done("bugs", text, keep=verdict.outcome in ("survived", "error"))
        return verdict

    return copies.map(job, mutants)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tools.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--ids", nargs="+", default=[], metavar="PATTERN", help="only entries with such ids")
    parser.add_argument("--area", nargs="+", default=[], metavar="PATTERN", help="only files that begin like this")
    parser.add_argument("--quick", action="store_true", help="only entries whose tests take at most 3 s")
    parser.add_argument("--sample", type=int, metavar="N", help="only N entries, from every area in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="copies of the tree (default: cores)")
    parser.add_argument("--timeout", type=float, default=240.0, metavar="SECONDS", help="limit of one bug's tests")
    parser.add_argument("--no-baseline", action="store_true", help="take it that the tests pass without a bug")
    parser.add_argument("--out", type=Path, metavar="JSON", help="write the results to this file")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> list[Mutant]:
    """Return the entries to run. Raises CatalogueError when there is none, or when one does not apply."""
    mutants = catalogue.select(catalogue.load(ROOT), ids=options.ids, areas=options.area)
    if options.quick:
        mutants = [mutant for mutant in mutants if mutant.quick]
    if options.sample is not None:
        mutants = catalogue.sample(mutants, options.sample, options.seed)
    if not mutants:
        raise CatalogueError("no entry matches --ids, --area and --quick")
    if found := catalogue.check(mutants, ROOT):
        raise CatalogueError("\n".join(found))
    return mutants


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the tests that run are ended
    try:
        mutants = chosen(options)
    except CatalogueError as error:
        print(error, file=sys.stderr)
        return 2
    selections = 0 if options.no_baseline else len({mutant.tests for mutant in mutants})
    workers = max(1, min(options.workers, len(mutants)))
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        Copies(Path(folder), workers) as copies,
        Display(selections + len(mutants)) as display,
    ):
        display.line(f"{len(mutants)} bugs, {selections} selections of tests, {workers} copies")
        baselines = None if options.no_baseline else run_baselines(mutants, copies, display, options.timeout)
        verdicts = run_mutants(mutants, baselines, copies, display, options.timeout)
    show(verdicts, display.console)
    if options.out is not None:
        write_json(verdicts, options.out)
    found = problems(verdicts)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
