"""Break promises to users on purpose, one at a time in a copy of the source, and run the tests that must notice.

    python -m tools.mutants                              # every promise of tests/mutants.toml
    python -m tools.mutants --area core/algorithms       # those of one file or folder
    python -m tools.mutants --changed main               # mutate the lines that differ from main with cosmic-ray

A bug is killed when its tests pass without it and fail with it. Exit code 1: a survivor, tests that do not pass without
the bug, or fewer than 95 % killed. Entries whose text has left the source are listed and count as not killed."""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
CATALOGUE = "tests/mutants.toml"
LEAST_SCORE = 0.95
PACKAGES = (
    "allocation",
    "config_schema",
    "core",
    "mcore_adapter",
    "model_specs",
    "rollout",
    "slipstream",
    "tools",
    "tracing",
)


class CatalogueError(ValueError):
    """A malformed entry or a choice that cannot be tried; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One promise and its bug: in `file`, the text `find` is replaced by `replace`."""

    id: str
    promise: str
    """The behavior that a user relies on, in one sentence."""
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    """Arguments of pytest: files, node ids, and `-k` with its expression."""

    def missing(self, root: Path) -> str:
        """Return why the entry does not fit the source any more; empty if it fits."""
        path = root / self.file
        if not path.is_file():
            return f"there is no file {self.file}"
        count = path.read_text(encoding="utf-8").count(self.find)
        if count != 1:
            return f"find={self.find!r} must occur once in {self.file}; found {count} times"
        files = [test.partition("::")[0] for test in self.tests if test.startswith("tests/")]
        gone = [file for file in files if not (root / file).exists()]
        return f"there is no test file {gone[0]}" if gone else ""


def load(root: Path) -> list[Mutant]:
    """Return the entries of the catalogue in order. Raises CatalogueError."""
    entries = tomllib.loads((root / CATALOGUE).read_text(encoding="utf-8"))["mutant"]
    known = {field.name for field in fields(Mutant)}
    mutants: dict[str, Mutant] = {}
    for entry in entries:
        name = entry.get("id", "an entry without id")
        if entry.keys() != known:
            raise CatalogueError(f"{name}: keys must be {sorted(known)}; found {sorted(entry)}")
        if empty := [key for key in sorted(known - {"replace"}) if not entry[key]]:
            raise CatalogueError(f"{name}: {empty[0]} must not be empty")
        if entry["find"] == entry["replace"]:
            raise CatalogueError(f"{name}: replace must differ from find={entry['find']!r}")
        if name in mutants:
            raise CatalogueError(f"{name}: the id occurs more than once")
        mutants[name] = Mutant(**{**entry, "tests": tuple(entry["tests"])})
    return list(mutants.values())


def select(mutants: Sequence[Mutant], *, ids: Sequence[str] = (), areas: Sequence[str] = ()) -> list[Mutant]:
    """Return the entries whose id and file match one of the patterns; no patterns: all."""
    return [
        mutant
        for mutant in mutants
        if (not ids or any(fnmatch(mutant.id, pattern) for pattern in ids))
        and (not areas or any(fnmatch(mutant.file, f"{pattern.rstrip('/')}*") for pattern in areas))
    ]


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


def changed_files(root: Path, branch: str) -> list[str]:
    """Return the Python files of the packages that differ from `branch`. Raises CatalogueError if git has no such
    branch."""
    command = ["git", "-C", str(root), "diff", "--name-only", "--diff-filter=d", branch, "--", *PACKAGES]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        raise CatalogueError(f"--changed {branch}: {listed.stderr.strip()}; name a branch or commit of this repository")
    return [name for name in listed.stdout.splitlines() if name.endswith(".py")]


def mirror_of(file: str, root: Path) -> str:
    """Return the tests that mirror a file: the module named for it or for its folder, else the nearest folder of
    tests."""
    path = Path(file).with_suffix("")
    while True:
        folder = Path("tests") / path.parent
        module = folder / f"test_{path.name}.py"
        if (root / module).is_file():
            return str(module)
        if (root / folder).is_dir():
            return str(folder)
        path = path.parent


def mutate(file: str, root: Path, tree: Path, *, branch: str, limit_seconds: float) -> tuple[int, list[str]]:
    """Mutate the changed lines of one file in `tree`, a copy of `root`. Return the number of mutants, and the survivors
    as differences of the source."""
    tests = mirror_of(file, root)
    command = shlex.join(pytest_command([tests, "-m", "not slow and not nightly"]))
    config, session = tree.parent / "cosmic-ray.toml", tree.parent / "cosmic-ray.sqlite"
    session.unlink(missing_ok=True)
    config.write_text(
        f"[cosmic-ray]\nmodule-path = {file!r}\ntimeout = {limit_seconds}\ntest-command = {command!r}\n"
        f"excluded-modules = []\n[cosmic-ray.distributor]\nname = 'local'\n"
        f"[cosmic-ray.filters.git-filter]\nbranch = {branch!r}\n"
    )
    variables = environment(tree)
    # Only git itself may see the repository of `root`: the tests must not find it in place of their tree.
    of_git = variables | {"GIT_DIR": _git_dir(root), "GIT_WORK_TREE": str(tree)}
    _cosmic_ray("cosmic_ray.cli", ["init", str(config), str(session)], tree, variables)
    _cosmic_ray("cosmic_ray.tools.filters.git", [str(session), "--config", str(config)], tree, of_git)
    _cosmic_ray("cosmic_ray.cli", ["exec", str(config), str(session)], tree, variables)
    dump = _cosmic_ray("cosmic_ray.cli", ["dump", str(session)], tree, variables)
    results = [result for _, result in map(json.loads, dump.splitlines()) if result["worker_outcome"] != "skipped"]
    return len(results), [result["diff"] for result in results if result["test_outcome"] == "survived"]


def _git_dir(root: Path) -> str:
    command = ["git", "-C", str(root), "rev-parse", "--absolute-git-dir"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _cosmic_ray(module: str, arguments: Sequence[str], tree: Path, variables: dict[str, str]) -> str:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=tree, env=variables, stdout=subprocess.PIPE, text=True, check=True).stdout


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
        mutants = select(load(ROOT), ids=options.ids, areas=options.area)
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
