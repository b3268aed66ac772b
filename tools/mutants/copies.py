"""Copies of the source tree in which one file at a time holds a bug."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.mutants.catalogue import Mutant

_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "build", "dist", "shared")
_ENVIRONMENT = ".venv"


def copy_tree(root: Path, target: Path) -> Path:
    """Copy the source tree to the new folder `target` and return it: the files that git lists, or else all sources.

    The environment becomes a link: nothing in it is written.
    """
    files = _files_of_git(root)
    if files is None:
        shutil.copytree(root, target, ignore=_LEFT_OUT)
    else:
        for name in files:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    if (root / _ENVIRONMENT).exists():
        (target / _ENVIRONMENT).symlink_to((root / _ENVIRONMENT).resolve())
    return target


def _files_of_git(root: Path) -> list[str] | None:
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return [name for name in listed.stdout.split("\0") if (root / name).is_file()] if listed.returncode == 0 else None


@contextmanager
def applied(mutant: Mutant, tree: Path) -> Iterator[None]:
    """Put the bug into the tree, and take it out at the end. Raises CatalogueError."""
    path = tree / mutant.file
    original = path.read_bytes()
    changed = mutant.mutated(tree)
    try:
        _write(path, changed.encode())
        yield
    finally:
        _write(path, original)


def _write(path: Path, content: bytes) -> None:
    # Python compares size and whole seconds of the source with what was compiled: an equally long change made within
    # a second would be overlooked.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    path.write_bytes(content)
