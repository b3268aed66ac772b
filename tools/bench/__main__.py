"""Measure speed, memory and accuracy of Slipstream, each figure beside its baseline in the same run.

    python -m tools.bench cpu [--trl-python /path/to/trl-env/bin/python] [--only update rollout]
    CUDA_VISIBLE_DEVICES=2,3 python -m tools.bench gpu [--only update push] [--shape 1.5B]

Writes benchmarks/{host}-{date}.json, a list of rows {name, value, unit, baseline, ratio, target, command, versions},
and prints the same as a markdown table. Rows of other measurements that the file has stay. TRL is measured in an
environment of its own, and left out without one.
"""

import argparse
import json
import logging
import os
import platform
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rollout.inference.gpus import query_gpus
from tools import arguments as cli
from tools.bench import DEFAULT_SHAPE, MODELS, Figure, Scene

PACKAGES = ("torch", "megatron-core", "ray", "transformers", "sglang", "sgl-deep-gemm", "transformer-engine")
MEASUREMENTS = {
    "cpu": {
        "config": "cpu:dry_run",
        "update": "cpu:train_step",
        "rollout": "cpu:generator",
        "async": "cpu:sync_and_async",
        "loop": "cpu:loop",
        "memory": "cpu:memory",
        "datapath": "datapath:datapath",
        "store": "cpu:store",
        "evaluation": "cpu:evaluation",
        "agents": "agents:agents",
        "sandbox": "agents:sandbox",
        "convert": "cpu:convert_both_ways",
    },
    "gpu": {
        "async": "gpu.runs:asynchronous",  # runs need GPUs that this process has not used yet
        "trl": "gpu.runs:against_trl",
        "update": "gpu.trainer:update",
        "experts": "gpu.trainer:experts",
        "long": "gpu.trainer:long",
        "rollout": "gpu.servers:rollout",
        "server_start": "gpu.servers:server_start",
        "waves": "gpu.servers:waves",
        "push": "gpu.push:push",
        "checkpoint": "gpu.trainer:checkpoint",
        "plan": "gpu.plan:plan",
        "plan_later": "gpu.plan:plan_later",
        "plan_runs": "gpu.plan:plan_runs",
        "plan_search": "gpu.plan:plan_search",
    },
}
"""Measurements by device and name, in the order in which they run: module of this folder, and function."""


def main() -> None:
    parser = cli.parser_of("tools.bench", __doc__)
    parser.add_argument("device", choices=["cpu", "gpu"], help="what to measure on")
    parser.add_argument("--only", nargs="+", choices=sorted(MEASUREMENTS["cpu"].keys() | MEASUREMENTS["gpu"].keys()))
    parser.add_argument("--trl-python", type=Path, help="interpreter of an environment that has trl")
    parser.add_argument("--shape", choices=list(MODELS), default=DEFAULT_SHAPE, help="gpu: shape of the model")
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
    gpus = query_gpus()
    if given.device == "gpu" and not given.trial and not gpus:
        parser.error("gpu: nvidia-smi shows none on this host; write cpu, or add --trial")
    if unknown := set(given.only or ()) - MEASUREMENTS[given.device].keys():
        parser.error(f"--only {' '.join(sorted(unknown))}: not measured on {given.device}")
    if given.device == "gpu" and "async" in (given.only or ()) and len(gpus) == 1:
        parser.error("--only async: it needs 2 GPUs, and this host shows 1")
    if given.keep is not None and given.keep.exists() and any(given.keep.iterdir()):
        parser.error(f"--keep {given.keep}: measurements start with an empty folder; name another one")
    for python in (given.trl_python, given.sglang_python):
        if python is not None and not os.access(python, os.X_OK):
            parser.error(f"{python}: no such interpreter")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    end_on_sigterm()
    lines = list(_measure(given, num_gpus=len(gpus)))
    print("\n| figure | value | baseline | ratio | target |\n|---|---|---|---|---|")
    print("\n".join(lines))


def end_on_sigterm() -> None:
    """Let SIGTERM, which `timeout` sends, end this process as Ctrl-C does: measurements end their servers then."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def _measure(given: argparse.Namespace, *, num_gpus: int) -> Iterator[str]:
    """Run the measurements; write each figure when it is there, and print and yield its line of the table."""
    versions = {"python": platform.python_version(), **{name: _installed(name) for name in PACKAGES}}
    if given.device == "gpu":
        os.environ["LOCAL_RANK"] = "0"
    with kept_or_temporary(given.keep) as folder:
        scene = Scene(
            folder=folder,
            trl_python=given.trl_python,
            sglang_python=given.sglang_python,
            shape=given.shape,
            raw=MODELS[given.shape],
        )
        for name, place in MEASUREMENTS[given.device].items():
            if given.only and name not in given.only:
                continue
            if given.device == "gpu" and name == "async" and num_gpus == 1:
                print("async is left out: it needs 2 GPUs", flush=True)
                continue
            shape = f" --shape {given.shape}" if given.shape != DEFAULT_SHAPE else ""
            command = f"python -m tools.bench {given.device} --only {name}{shape}"
            for figure in find(place)(scene):
                ratio = figure.value / figure.baseline if figure.baseline else None
                row = {**asdict(figure), "ratio": ratio, "command": command, "versions": versions}
                _write(given.output, _host(given.device), row)
                line = _line(figure, ratio)
                print(line, flush=True)
                yield line


@contextmanager
def kept_or_temporary(folder: Path | None) -> Iterator[Path]:
    """Yield this folder, made where it does not exist, or one that exists for the block."""
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.resolve()


def find(place: str) -> Callable[[Scene], Iterator[Figure]]:
    """Import what stands at module:name of this folder."""
    module, _, name = place.partition(":")
    found: Callable[[Scene], Iterator[Figure]] = getattr(import_module(f"tools.bench.{module}"), name)
    return found


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "elsewhere"


def _host(device: str) -> str:
    """Return the name of the file: the machine's kind, not its name."""
    if device == "cpu":
        return f"cpu-{os.cpu_count()}core"
    gpus = query_gpus()
    return f"{len(gpus)}x-{gpus[0].name.lower().replace(' ', '-')}" if gpus else "no-gpu"


def _write(folder: Path, name: str, row: Mapping[str, object]) -> None:
    """Put a row into today's file, in place of the one of the same name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{date.today().isoformat()}.json"
    old = json.loads(path.read_text()) if path.exists() else []
    kept = [one for one in old if one["name"] != row["name"]]
    path.write_text(json.dumps([*kept, row], indent=1) + "\n")


def _line(figure: Figure, ratio: float | None) -> str:
    """Return one row of the Markdown table."""
    baseline = "" if figure.baseline is None else f"{figure.baseline:,.4g}"
    shown = "" if ratio is None else f"{ratio:.2f}"
    name = figure.name.replace("|", "\\|")  # of an allocation, not of a table
    return f"| {name} | {figure.value:,.4g} {figure.unit} | {baseline} | {shown} | {figure.target} |"


if __name__ == "__main__":
    main()
