"""List runs with their state, step, and reward or loss.

    slipstream runs [FOLDER]

FOLDER is a fileroot (external_configs.cluster_config.fileroot); default: ./runs and ~/.cache/slipstream. The newest run
comes last.
"""

import fcntl
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

import psutil

from core.config.runtime import ClusterConfig
from core.monitoring.health import History, Metrics
from core.monitoring.metrics import DRIVER, ROLLOUT, TRAINER, TRAINER_GPU, read_rows
from core.runs.paths import RUNNING
from core.runs.record import COMPLETE, STARTS, settings_of
from rollout.inference.gpus import query_gpus
from tools import arguments


@dataclass(frozen=True)
class Listed:
    """One run of the list."""

    name: str
    state: str
    """running, complete or stopped."""
    started: datetime
    step: int
    reward: float | None
    """Of the last step, None for a run without rewards."""
    loss: float | None
    """Of the last step, None for a run with rewards."""
    logs: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Print the list; return 0, or 2 where there is no run."""
    parser = arguments.parser_of("tools.runs", __doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="fileroot of the runs")
    given = parser.parse_args(argv).folder
    roots = [Path("runs"), Path(ClusterConfig().fileroot).expanduser()] if given is None else [given]
    found = sorted((run for root in roots for run in runs_below(root)), key=lambda run: run.started)
    if not found:
        places = " and ".join(f"{root}/logs" for root in roots)
        return arguments.refused(f"no run in {places}; give the fileroot of a run")
    width = max(len(run.name) for run in found)
    print(f"{'run':<{width}}  {'state':<8}  {'started':<16}  {'step':>6}  {'reward':>8}  {'loss':>8}  logs")
    for run in found:
        values = "  ".join(f"{'-' if value is None else f'{value:.3f}':>8}" for value in (run.reward, run.loss))
        print(f"{run.name:<{width}}  {run.state:<8}  {run.started:%Y-%m-%d %H:%M}  {run.step:>6}  {values}  {run.logs}")
    return 0


def runs_below(root: Path) -> Iterator[Listed]:
    """Yield the runs of a fileroot."""
    for starts in root.glob(f"logs/*/*/*/{STARTS}"):
        logs = starts.parent
        rows = steps_of(rows_of(logs))
        last = rows[-1] if rows else {}
        yield Listed(
            name=f"{logs.parent.name}/{logs.name}",
            state=state_of(logs),
            started=datetime.fromtimestamp(starts.stat().st_mtime),
            step=int(last.get("step", 0)),
            reward=last.get("reward/mean"),
            loss=None if "reward/mean" in last else last.get("loss"),
            logs=logs,
        )


def rows_of(logs: Path) -> list[dict[str, float]]:
    """Return the metrics of a run; empty before its first step."""
    file = logs / "metrics.jsonl"
    return read_rows(file) if file.exists() else []


def steps_of(rows: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Return the rows of steps, without those of evaluations."""
    return [row for row in rows if "time/step" in row]


def history_of(logs: Path, metrics: Metrics) -> History:
    """Return what the rules of health read of a run. The memory of this host is the limit of runs of this host."""
    is_here = _last_start(logs).get("host") == socket.gethostname()
    return History(metrics, settings_of(logs), _host_limits() if is_here else {})


@cache
def _host_limits() -> dict[str, float]:
    """Return the GiB that this host has, by metric of memory/."""
    limits = dict.fromkeys((DRIVER, ROLLOUT, TRAINER), psutil.virtual_memory().total / 2**30)
    if gpus := query_gpus():
        limits[TRAINER_GPU] = min(gpu.total_mib for gpu in gpus) / 1024
    return limits


def _last_start(logs: Path) -> dict[str, object]:
    """Return the newest row of starts.jsonl; empty where there is none."""
    try:
        return read_rows(logs / STARTS)[-1]
    except (OSError, ValueError, IndexError):
        return {}


def state_of(logs: Path) -> str:
    """Return whether a run is running, complete or stopped."""
    try:
        with open(logs / RUNNING) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "running"
    except OSError:  # no lock file, or a file system without locks
        pass
    return "complete" if (logs / COMPLETE).exists() else "stopped"


if __name__ == "__main__":
    sys.exit(main())
