"""Let cosmic-ray mutate the lines that differ from another branch, and run the tests beside each changed file."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.mutants.catalogue import CatalogueError
from tools.mutants.trial import environment, pytest_command

PACKAGES = ("allocation", "core", "mcore_adapter", "model_specs", "rollout", "slipstream", "tools", "tracing")


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
