"""Measure speed, memory and accuracy of Slipstream, each figure beside its baseline in the same run.

    python -m tools.bench cpu [--trl-python /path/to/trl-env/bin/python] [--only update rollout]
    CUDA_VISIBLE_DEVICES=2,3 python -m tools.bench gpu [--only update push] [--shape 1.5B]

Writes benchmarks/{host}-{date}.json, a list of rows {name, value, unit, baseline, ratio, target, command, versions},
and prints the same as a markdown table. Rows of other measurements that the file has stay. TRL is measured in an
environment of its own, and left out without one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rollout.inference.gpus import query_gpus
from tools import arguments as cli
from tools.bench.gpu.shapes import DEFAULT_SHAPE, SHAPES

PACKAGES = ("torch", "megatron-core", "ray", "transformers")
GPU_PACKAGES = ("sglang", "sgl-deep-gemm", "transformer-engine")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure. `ratio` is value / baseline; `target` is what was promised, as text."""

    name: str
    value: float
    unit: str
    baseline: float | None
    ratio: float | None
    target: str
    command: str
    versions: dict[str, str]


MEASUREMENTS = {
    "cpu": {
        "config": "cpu:dry_run",
        "update": "cpu:train_step",
        "rollout": "cpu:generator",
        "async": "cpu:sync_and_async",
        "loop": "cpu:loop",
        "memory": "cpu:memory",
        "datapath": "datapath:datapath",
        "convert": "convert:both_ways",
    },
    "gpu": {
        "async": "gpu.runs:asynchronous",  # runs need GPUs that this process has not used yet
        "trl": "gpu.runs:against_trl",
        "update": "gpu.trainer:update",
        "experts": "gpu.large:experts",
        "long": "gpu.large:long",
        "rollout": "gpu.servers:rollout",
        "server_start": "gpu.servers:server_start",
        "push": "gpu.push:push",
        "checkpoint": "gpu.trainer:checkpoint",
        "convert": "gpu.trainer:convert",
    },
}
"""Measurements by device and name, in the order in which they run: module of this folder, and function."""
SCENES = {"cpu": "cpu:Scene", "gpu": "gpu.trainer:Scene"}
NUM_GPUS = {"async": 2}
"""GPUs that a measurement needs where one is not enough."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=cli.program("tools.bench"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", choices=["cpu", "gpu"], help="what to measure on")
    parser.add_argument("--only", nargs="+", choices=sorted(MEASUREMENTS["cpu"].keys() | MEASUREMENTS["gpu"].keys()))
    parser.add_argument("--trl-python", type=Path, help="interpreter of an environment that has trl")
    parser.add_argument("--shape", choices=list(SHAPES), default=DEFAULT_SHAPE, help="gpu: shape of the model")
    parser.add_argument("--sglang-python", type=Path, help="gpu: Python interpreter with SGLang, if this one has none")
    parser.add_argument("--trial", action="store_true", help="gpu: without a GPU, run everything small on the CPU")
    parser.add_argument("--output", type=cli.new_folder, default=Path("benchmarks"))
    parser.add_argument(
        "--keep",
        type=cli.new_folder,
        metavar="FOLDER",
        help="keep there what measurements write, with logs and spans of runs; default: remove it",
    )
    given = parser.parse_args()
    if given.device == "gpu" and not given.trial and not query_gpus():
        parser.error("gpu: nvidia-smi shows none on this host; write cpu, or add --trial")
    unknown = set(given.only or ()) - MEASUREMENTS[given.device].keys()
    if unknown:
        parser.error(f"--only {' '.join(sorted(unknown))}: not measured on {given.device}")
    for name in given.only or ():
        if given.device == "gpu" and (why := missing_gpus(name)):
            parser.error(f"--only {name}: {why}")
    if given.keep is not None and given.keep.exists() and any(given.keep.iterdir()):
        parser.error(f"--keep {given.keep}: measurements start with an empty folder; name another one")
    for python in (given.trl_python, given.sglang_python):
        if python is not None and not os.access(python, os.X_OK):
            parser.error(f"{python}: no such interpreter")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    end_on_sigterm()
    rows = list(_measure(given))
    print("\n| figure | value | baseline | ratio | target |\n|---|---|---|---|---|")
    for row in rows:
        print(line(row))


def end_on_sigterm() -> None:
    """Let SIGTERM, which `timeout` sends, end this process as Ctrl-C does: measurements end their servers then."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def _measure(given: argparse.Namespace) -> Iterator[Row]:
    """Run the measurements; write and print each figure when it is there."""
    packages = PACKAGES + (GPU_PACKAGES if given.device == "gpu" else ())
    versions = {"python": platform.python_version(), **{name: installed(name) for name in packages}}
    options: dict[str, Any] = {"trl_python": given.trl_python}
    if given.device == "gpu":
        os.environ["LOCAL_RANK"] = "0"
        options |= {"shape": given.shape, "sglang_python": given.sglang_python}
    rows: list[Row] = []
    with kept_or_temporary(given.keep) as folder:
        scene = find(SCENES[given.device])(folder=folder, **options)
        for name in MEASUREMENTS[given.device]:
            if given.only and name not in given.only:
                continue
            if given.device == "gpu" and (why := missing_gpus(name)):
                print(f"{name} is left out: {why}", flush=True)
                continue
            command = _command(given, name)
            for figure in find(MEASUREMENTS[given.device][name])(scene):
                ratio = figure.value / figure.baseline if figure.baseline else None
                rows.append(Row(**asdict(figure), ratio=ratio, command=command, versions=versions))
                print(line(rows[-1]), flush=True)
                write(given.output, host(given.device), rows)
                yield rows[-1]


def _command(given: argparse.Namespace, name: str) -> str:
    """Return what measures `name` alone as it is measured here; interpreters and folders differ between hosts."""
    words = ["python -m tools.bench", given.device, "--only", name]
    if given.device == "gpu":
        words += ["--shape", given.shape] * (given.shape != DEFAULT_SHAPE)
    return " ".join(words)


@contextmanager
def kept_or_temporary(folder: Path | None) -> Iterator[Path]:
    """Yield this folder, made where it does not exist, or one that exists for the block."""
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.resolve()


def find(place: str) -> Callable[..., Any]:
    """Import what stands at module:name of this folder."""
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"tools.bench.{module}"), name)
    return found


def missing_gpus(name: str) -> str | None:
    """Return what this host lacks for a measurement of GPU, or None. Without any GPU they run small, as a trial."""
    found, needed = len(query_gpus()), NUM_GPUS.get(name, 1)
    if 0 < found < needed:
        return f"it needs {needed} GPUs, and this host shows {found}"
    return None


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "elsewhere"


def host(device: str) -> str:
    """Return the name of the file: the machine's kind, not its name."""
    if device == "cpu":
        return f"cpu-{os.cpu_count()}core"
    gpus = query_gpus()
    return f"{len(gpus)}x-{gpus[0].name.lower().replace(' ', '-')}" if gpus else "no-gpu"


def write(folder: Path, name: str, rows: list[Row]) -> None:
    """Put the rows into today's file, in place of those of the same names."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{date.today().isoformat()}.json"
    old = json.loads(path.read_text()) if path.exists() else []
    mine = {row.name for row in rows}
    kept = [row for row in old if row["name"] not in mine]
    path.write_text(json.dumps(kept + [asdict(row) for row in rows], indent=1) + "\n")


def line(row: Row) -> str:
    """Return one row of the Markdown table."""
    baseline = "" if row.baseline is None else f"{row.baseline:,.4g}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return f"| {row.name} | {row.value:,.4g} {row.unit} | {baseline} | {ratio} | {row.target} |"


if __name__ == "__main__":
    main()
