"""Run tests in a copy of the source tree and judge from the result whether they notice a bug."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tools.mutants.catalogue import Mutant

Outcome = Literal["killed", "survived", "gone", "error"]
_TESTS_FAILED = 1
_BROKEN = re.compile(r"^E +(?:\w+\.)*(NameError|ImportError|ModuleNotFoundError|SyntaxError|IndentationError)\b", re.M)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of the tests of one bug."""

    mutant: Mutant
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class TestRun:
    """The result of one run of pytest; `code` is None when it exceeded the limit."""

    code: int | None
    output: str

    __test__ = False

    @property
    def passed(self) -> bool:
        return self.code == 0 and re.search(r"\b[1-9]\d* passed", self.output) is not None

    @property
    def tail(self) -> str:
        """The last lines, with the reason."""
        return "\n".join([line for line in self.output.splitlines() if line.strip()][-8:])


def copy_tree(root: Path, target: Path) -> Path:
    """Copy the files that git lists to the new folder `target` and return it; link the environment."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    if (root / ".venv").exists():
        (target / ".venv").symlink_to((root / ".venv").resolve())
    return target


def environment(tree: Path) -> dict[str, str]:
    """Return the variables of a process that runs tests in `tree`: its source comes before an installed one.

    Nothing is compiled to files: Python would overlook a bug of equal length that was put in within a second.
    """
    return os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def pytest_command(tests: Sequence[str]) -> list[str]:
    """Return the command that runs `tests` in one process up to the first failure."""
    return [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]


def run_tests(tests: Sequence[str], tree: Path, limit_seconds: float) -> TestRun:
    """Run the tests in `tree`; kill them and what they started at the limit."""
    process = subprocess.Popen(
        pytest_command(tests),
        cwd=tree,
        env=environment(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        return TestRun(code=None, output="")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return TestRun(code=process.returncode, output=output)


@contextmanager
def applied(mutant: Mutant, tree: Path) -> Iterator[None]:
    """Put the bug into the tree, and take it out at the end."""
    path = tree / mutant.file
    original = path.read_text(encoding="utf-8")
    try:
        path.write_text(original.replace(mutant.find, mutant.replace), encoding="utf-8")
        yield
    finally:
        path.write_text(original, encoding="utf-8")


def try_mutant(mutant: Mutant, tree: Path, *, limit_seconds: float) -> Verdict:
    """Run the tests of a bug in the tree with the bug: only a test that fails, or never ends, kills it."""
    if reason := mutant.missing(tree):
        return Verdict(mutant=mutant, outcome="gone", detail=reason)
    with applied(mutant, tree):
        run = run_tests(mutant.tests, tree, limit_seconds)
    if run.code == 0:
        return Verdict(mutant=mutant, outcome="survived", detail=f"write a test: {' '.join(mutant.tests)} passed")
    if broken := _BROKEN.search(run.output):
        return Verdict(mutant=mutant, outcome="error", detail=f"the bug is a typing error: {broken.group(1)}")
    if run.code in (_TESTS_FAILED, None):
        return Verdict(mutant=mutant, outcome="killed")
    return Verdict(mutant=mutant, outcome="error", detail=f"pytest ended with exit code {run.code}:\n{run.tail}")
