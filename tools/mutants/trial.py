"""Run tests in a copy of the tree and judge from the result whether they notice a bug."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tools.mutants.catalogue import Mutant
from tools.mutants.copies import applied

Outcome = Literal["killed", "killed by timeout", "survived", "error"]
KILLED: frozenset[Outcome] = frozenset({"killed", "killed by timeout"})
_TESTS_FAILED = 1
_MARGIN = 4
"""A timeout counts as a kill if the tests without the bug take at most the limit divided by this."""
_BROKEN = re.compile(r"^E +(?:\w+\.)*(NameError|ImportError|ModuleNotFoundError|SyntaxError|IndentationError)\b", re.M)


@dataclass(frozen=True, kw_only=True)
class TestRun:
    """One run of pytest; `code` is None when it exceeded the limit."""

    code: int | None
    seconds: float
    output: str

    __test__ = False

    @property
    def passed(self) -> bool:
        return self.code == 0 and re.search(r"\b[1-9]\d* passed", self.output) is not None

    @property
    def tail(self) -> str:
        """The last lines, with the reason."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return "\n".join(lines[-8:])


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the tests did with one bug."""

    mutant: Mutant
    outcome: Outcome
    seconds: float
    detail: str = ""


class Tree:
    """A copy of the source with a process that runs tests in it, one selection at a time. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._output = folder.with_suffix(".output")

    def __enter__(self) -> Tree:
        # As many threads as the machine has cores, in as many copies, would wait for each other.
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("warm.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=self.folder,
        )  # fmt: skip
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.terminate()  # it ends the tests that run
        self._process.communicate()

    def run(self, tests: tuple[str, ...], limit_seconds: float) -> TestRun:
        """Run the tests one after the other, up to the first failure."""
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        job = {"tests": tests, "tree": str(self.folder), "output": str(self._output), "limit_seconds": limit_seconds}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that runs the tests in {self.folder} exited; its message is above")
        output = self._output.read_text(encoding="utf-8", errors="replace")
        return TestRun(**json.loads(answer), output=output)


def judge(mutant: Mutant, run: TestRun, *, baseline_seconds: float, limit_seconds: float) -> Verdict:
    """Return what a run of the tests with the bug shows: a failed test kills; other exit codes but 0 are errors."""

    def verdict(outcome: Outcome, detail: str = "") -> Verdict:
        return Verdict(mutant=mutant, outcome=outcome, seconds=run.seconds, detail=detail)

    if run.code is None:
        if baseline_seconds * _MARGIN <= limit_seconds:
            return verdict("killed by timeout")
        return verdict(
            "error",
            f"the limit of {limit_seconds:.0f} s is too short for tests that take {baseline_seconds:.0f} s without the "
            f"bug: give --timeout {baseline_seconds * _MARGIN:.0f} or more, or choose cheaper tests",
        )
    if run.code == 0:
        return verdict("survived")
    broken = _BROKEN.search(run.output)
    if run.code == _TESTS_FAILED and (broken is None or mutant.imports_fail):
        return verdict("killed")
    if mutant.imports_fail and broken is not None:
        return verdict("killed")
    if broken is not None:
        return verdict("error", f"the tests ended with {broken.group(1)}: the change is not a bug but a typing error")
    return verdict("error", f"pytest ended with exit code {run.code}, not with a failed test:\n{run.tail}")


def try_mutant(mutant: Mutant, tree: Tree, *, baseline_seconds: float, limit_seconds: float) -> Verdict:
    """Put the bug into the tree, run its tests, take the bug out. Raises CatalogueError."""
    with applied(mutant, tree.folder):
        run = tree.run(mutant.tests, limit_seconds)
    return judge(mutant, run, baseline_seconds=baseline_seconds, limit_seconds=limit_seconds)
