"""Types of command-line arguments that refuse what cannot work, before anything is imported or started.

Used as `type=` of argparse, which names the argument and ends with exit code 2.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from model_specs import hub


class BadRequest(ValueError):
    """The command line names something that does not exist or cannot be read."""


def program(module: str) -> str:
    """Return what a usage line begins with: `slipstream X` where the console script runs the module as X, else
    `python -m MODULE`."""
    script = sys.orig_argv[1:3]
    if len(script) == 2 and Path(script[0]).stem == "slipstream":
        return f"slipstream {script[1]}"
    return f"python -m {module}"


BAD_INPUT = 2
"""Exit code of a command that its arguments or files keep from its work."""


def refused(why: object, *, code: int = BAD_INPUT) -> int:
    """Print on one line of stderr why a command does nothing, or ends; return its exit code."""
    sys.stderr.write(f"error: {why}\n")
    return code


class _Parser(argparse.ArgumentParser):
    """Writes an error as one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def parser_of(module: str, about: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command, whose help begins with the text `about`."""
    return _Parser(prog=program(module), description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def run_with(path: Path, name: str, *, without: str) -> Path:
    """Return the log folder of a run at or below `path`: the one that has a file or folder `name`. `without`: why a run
    may have none. Raises BadRequest unless there is exactly one."""
    path = path.expanduser()
    found = [path] if (path / name).exists() else sorted(p.parent for p in path.rglob(name))
    if len(found) == 1:
        return found[0]
    if found:
        raise BadRequest(f"{path}: {len(found)} runs are below it; choose one of " + ", ".join(map(str, found)))
    raise BadRequest(
        f"{path}: no {name} there or below; give the log folder of a run, which the run shows at its start ({without})"
    )


def integer(*, least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a type for integers from `least` to `most`."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer") from None
        if value < least or (most is not None and value > most):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{value} must be {bounds}")
        return value

    return integer


def number(*, least: float, most: float) -> Callable[[str], float]:
    """Return a type for numbers from `least` to `most`."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} must be from {least:g} to {most:g}")
        return value

    return number


def step_range(text: str) -> range:
    """Return the steps of `10` or `10..20`, both ends included."""
    first, dots, last = text.partition("..")
    if not first.isdigit() or (dots and not last.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no step and no range of steps; write 10 or 10..20")
    if int(last or first) < int(first):
        raise argparse.ArgumentTypeError(f"{text!r} is empty; write the smaller step first")
    return range(int(first), int(last or first) + 1)


seed = integer(least=0, most=2**32 - 1)
"""A seed of the run, and of torch and numpy."""


def new_folder(text: str) -> Path:
    """Return the path of a folder that is there and may be written, or that may be made."""
    path = Path(text).expanduser()
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a file; name a folder")
    existing = next(p for p in (path.absolute(), *path.absolute().parents) if os.path.exists(p))
    try:
        # Writing is the only test that covers read-only mounts and root; the file has no name.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: cannot write in {existing}: {error.strerror}") from None
    return path


def model(*, weights: bool = True) -> Callable[[str], Path]:
    """Return a type for models: a path, or the id of a model of the hub, which is downloaded. `weights`: with its
    weights."""

    def model(text: str) -> Path:
        try:
            return Path(hub.model_folder(os.path.expanduser(text), weights=weights))
        except hub.HubError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return model


def data_file(text: str) -> Path:
    """Return the path of a file that can be read: no folder, no pipe."""
    path = Path(text).expanduser()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
    if not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"{path}: it may not be read; change its permissions")
    return path
