"""Run the steps of a Dockerfile in a folder of its own, on a machine without docker.

    python -m tools.check_image docker/cpu.Dockerfile
    python -m tools.check_image docker/gpu.Dockerfile --resolve     # pip resolves the packages, and downloads few

Paths below /opt are below the folder; ENV, WORKDIR, COPY and RUN are done as docker does them, from the root of the
repository. In place of the image's base stands a virtual environment of its Python. Steps that install packages of the
distribution are left out, and with --resolve those that need the packages. Then torch alone is installed, as the build
for CPUs. Exit code 1: a step failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools import arguments as cli

ROOT = Path(__file__).resolve().parents[1]
_PLACE = "/opt"
_LAST_LINES = 20
_SMALL_TORCH = "https://download.pytorch.org/whl/cpu"
"""Packages that compile against torch cannot be resolved without one; any build of it serves."""


@dataclass(frozen=True)
class Step:
    """One instruction of a Dockerfile."""

    name: str
    words: str

    def __str__(self) -> str:
        shown = " ".join(self.words.split())
        return f"{self.name} {shown if len(shown) <= 100 else f'{shown[:97]}...'}"


def steps_of(text: str) -> Iterator[Step]:
    """Yield the instructions of a Dockerfile, continued lines joined, without comments. Raises ValueError for one that
    this check cannot do."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, words = line.strip().partition(" ")
            if name not in _DO:
                raise ValueError(f"{name}: this check does only {', '.join(_DO)}")
            yield Step(name, words.strip())


@dataclass
class Image:
    """A folder in place of an image that is built."""

    folder: Path
    resolve: bool
    """Let pip resolve packages without installing them."""
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    workdir: str = "/"

    def __post_init__(self) -> None:
        Path(self.place(_PLACE)).mkdir()

    def do(self, step: Step) -> str:
        """Do a step; return why it was left out, or an empty string. Raises StepFailed."""
        why: str = _DO[step.name](self, step.words)
        return why

    def place(self, text: str) -> str:
        """Return text with paths of the image as paths of this machine."""
        return re.sub(rf"(?<![\w.]){_PLACE}(?=/|\b)", f"{self.folder}{_PLACE}", text)

    def base(self, image: str) -> str:
        """Make a virtual environment of the base image's Python where it has one."""
        if found := re.match(r"python:(\d+\.\d+)", image):
            python = shutil.which(f"python{found[1]}")
            if python is None:
                raise StepFailed(f"{image}: this machine has no python{found[1]}")
            self._shell(f"{python} -m venv {self.folder}/base")
            self.env["PATH"] = f"{self.folder}/base/bin{os.pathsep}{self.env['PATH']}"
        return ""

    def set_env(self, words: str) -> str:
        """Set variables, which may name others."""
        for word in self.place(words).split():
            name, _, value = word.partition("=")
            self.env[name] = re.sub(r"\$(\w+)", lambda found: self.env.get(found[1], ""), value)
        return ""

    def set_workdir(self, path: str) -> str:
        """Make the folder in which the following steps run."""
        self.workdir = self.place(path)
        Path(self.workdir).mkdir(parents=True, exist_ok=True)
        return ""

    def copy(self, words: str) -> str:
        """Copy the files of the repository that git lists."""
        if words != ". .":
            raise StepFailed(f"COPY {words}: this check copies the whole repository")
        self._shell(f"git -C {ROOT} ls-files -z | (cd {ROOT} && xargs -0 cp --parents -t {self.workdir})")
        return ""

    def run(self, command: str) -> str:
        """Run a command of the shell."""
        if "apt-get" in command:
            return "packages of the distribution"
        if self.resolve and re.search(r'"torch[<>=]', command):
            command = re.sub(r"\bpip install\b", f"pip install --extra-index-url {_SMALL_TORCH}", command)
        elif self.resolve and "pip install" in command and "--upgrade pip" not in command:
            command = re.sub(r"\bpip install\b", "pip install --dry-run", command)
        elif self.resolve and "import" in command:
            return "the packages are not installed (--resolve)"
        self._shell(self.place(command))
        return ""

    def _shell(self, command: str) -> None:
        here = self.workdir if self.workdir != "/" else str(self.folder)
        done = subprocess.run(
            ["sh", "-ec", command], cwd=here, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )  # fmt: skip
        if done.returncode:
            raise StepFailed("\n".join(done.stdout.splitlines()[-_LAST_LINES:]) or f"exit code {done.returncode}")


class StepFailed(RuntimeError):
    """A step ended with an error: the last lines of its output."""


_DO = {"FROM": Image.base, "ENV": Image.set_env, "WORKDIR": Image.set_workdir, "COPY": Image.copy, "RUN": Image.run}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tools.check_image", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dockerfile", type=cli.data_file)
    parser.add_argument("--resolve", action="store_true", help="resolve packages without installing them")
    given = parser.parse_args(arguments)
    try:
        steps = list(steps_of(given.dockerfile.read_text(encoding="utf-8")))
    except ValueError as error:
        parser.error(f"{given.dockerfile}: {error}")
    with tempfile.TemporaryDirectory(prefix="image-") as folder:
        image = Image(Path(folder), given.resolve)
        for number, step in enumerate(steps, start=1):
            print(f"[{number}/{len(steps)}] {step}", flush=True)
            start = time.monotonic()
            try:
                left_out = image.do(step)
            except StepFailed as error:
                print(error, file=sys.stderr)
                print(f"{given.dockerfile}: step {number} failed: {step}", file=sys.stderr)
                return 1
            print(f"    {f'left out: {left_out}' if left_out else f'{time.monotonic() - start:.1f} s'}", flush=True)
    print(f"{given.dockerfile}: all {len(steps)} steps done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
