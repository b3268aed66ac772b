"""The processes of a run: host, memory, time of the last span or line of the log, the log, stacks, and questions to the
current weights (monitor.questions). And the spans of all of them in some steps."""

import heapq
import json
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

import psutil

from core.monitoring.logs import DRIVER_LOG
from core.processes.stacks import FOLDER as STACKS_FOLDER
from core.processes.stacks import collect_stacks
from core.runs.paths import QUESTIONS
from rollout.inference.gpus import Gpu, query_gpus
from tools.arguments import BadRequest
from tools.studio.folders import NotFound, Run, tail
from tools.timeline import Span, chosen_steps, clipped, read_spans, rows
from tracing import FOLDER as SPANS_FOLDER

_MOST_LINES = 500
_LOG_BYTES = 2 << 20
_ANSWER_SECONDS = 300


def processes(run: Run, query: Mapping[str, str]) -> dict[str, object]:
    """Return the processes that have left a file, the GPUs of this host while one of them runs here, and the logs."""
    here = socket.gethostname()
    gpus: list[Gpu] = []
    with suppress(OSError, ValueError, RuntimeError):
        gpus = query_gpus()
    on_gpus: Counter[int] = Counter()
    for user in (user for gpu in gpus for user in gpu.users):
        on_gpus[user.pid] += user.mib
    found = []
    for file in run.files(f"{STACKS_FOLDER}/*.txt"):
        with suppress(OSError, ValueError, KeyError):
            with open(file, encoding="utf-8", errors="replace") as lines:
                who = json.loads(lines.readline())
            process = _alive(who["pid"], who["started"]) if who["host"] == here else None
            found.append(
                {
                    "name": file.stem,
                    "host": who["host"],
                    "pid": who["pid"],
                    "state": _state(process) if who["host"] == here else "on another host",
                    "gib": process.memory_info().rss / 2**30 if process else None,
                    "gpu_gib": on_gpus[who["pid"]] / 1024 if process and who["pid"] in on_gpus else None,
                    "seconds_since": _seconds_since(run, file.stem),
                    "log": _log_of(run, file.stem),
                }
            )
    are_here = any(one["gib"] is not None for one in found)
    return {
        "processes": found,
        "gpus": [_card(gpu) for gpu in gpus] if are_here else [],
        "logs": [path.name for path in run.files("*.log")],
    }


def _card(gpu: Gpu) -> dict[str, object]:
    return {
        "index": gpu.index,
        "name": gpu.name,
        "use": gpu.use,
        "gib": gpu.used_mib / 1024,
        "of_gib": gpu.total_mib / 1024,
    }


def _alive(pid: int, started: float) -> psutil.Process | None:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if abs(process.create_time() - started) < 1:
            return process
    return None


def _state(process: psutil.Process | None) -> str:
    with suppress(psutil.Error):
        if process is not None:
            return "stopped" if process.status() == psutil.STATUS_STOPPED else "running"
    return "ended"


def _log_of(run: Run, name: str) -> str | None:
    for log in (f"{name}.log", DRIVER_LOG if name == "driver" else ""):
        if log and (run.logs / log).is_file():
            return log
    return None


def _seconds_since(run: Run, name: str) -> float | None:
    """Return the seconds since a process last wrote a span or a line of its log."""
    files = [run.logs / SPANS_FOLDER / f"{name}.jsonl", run.logs / f"{name}.log"]
    times = [file.stat().st_mtime for file in files if file.exists()]
    return max(0.0, time.time() - max(times)) if times else None


def log_lines(run: Run, query: Mapping[str, str]) -> dict[str, object]:
    """Return the last lines of a log that have a text. Raises NotFound."""
    name, text = query["name"], query.get("text", "").lower()
    if name not in {path.name for path in run.files("*.log")}:
        raise NotFound(f"{run.name}: there is no log {name}")
    lines = tail(run, name, most=_LOG_BYTES)
    kept = [line for line in lines if text in line.lower()]
    return {"lines": kept[-_MOST_LINES:], "found": len(kept), "of": len(lines)}


def stacks(run: Run, query: Mapping[str, object]) -> dict[str, object]:
    """Let a process write its Python stacks, and return them. Raises NotFound and OSError."""
    name = str(query["name"])
    file = Path(STACKS_FOLDER) / f"{name}.txt"
    if name not in {path.stem for path in run.files(f"{STACKS_FOLDER}/*.txt")}:
        raise NotFound(f"{run.name}: there is no process {name}")
    before = run.path(file.as_posix()).stat().st_size
    state = collect_stacks(run.logs, [name], why="asked for in the studio")
    with run.open(file.as_posix()) as written:
        written.seek(before)
        return {"state": state.get(name, "gone"), "text": written.read().decode("utf-8", "replace")}


def answers_questions(run: Run) -> bool:
    """Return whether a run that is under way was started with monitor.questions."""
    with suppress(NotFound):
        return bool(run.path(QUESTIONS)) and run.state == "running"
    return False


def ask(run: Run, body: Mapping[str, object]) -> dict[str, object]:
    """Return the answer of the current weights to `messages`. Raises NotFound and ValueError."""
    with run.open(QUESTIONS) as file:
        where = json.loads(file.read())
    if where["host"] != socket.gethostname():
        raise NotFound(f"{run.name} answers on {where['host']}; start the studio there")
    url = f"http://127.0.0.1:{int(where['port'])}/"
    headers = {"Authorization": f"Bearer {where['key']}", "Content-Type": "application/json"}
    request = Request(url, json.dumps({"messages": body["messages"]}).encode(), headers)
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=_ANSWER_SECONDS) as answer:
            found: dict[str, object] = json.load(answer)
            return found
    except HTTPError as error:
        raise ValueError(json.load(error)["error"]) from None
    except (URLError, TimeoutError) as error:
        raise NotFound(
            f"{run.name} does not answer: {getattr(error, 'reason', error)}; it has ended or is busy"
        ) from None


_MOST_SPANS = 12_000
_STEPS_LANE = "steps"


def timeline(run: Run, query: Mapping[str, str]) -> dict[str, object]:
    """Return the lanes of the steps `first` to `last`, by default of the last one; times in seconds from their begin.
    Raises NotFound and ValueError."""
    chosen = None
    if query.get("first"):
        first = int(query["first"])
        chosen = range(first, int(query.get("last") or first) + 1)
    spans = _spans(run)
    try:
        steps = chosen_steps(spans, chosen, 1)
    except BadRequest as error:
        raise NotFound(str(error).replace("--step: ", "")) from None
    begin, end = min(s.begin for s in steps), max(s.end for s in steps)
    inside = [span for span in clipped(spans, (begin, end)) if span.lane != _STEPS_LANE]
    shown = inside
    if len(inside) > _MOST_SPANS:
        longest = heapq.nlargest(_MOST_SPANS, inside, key=lambda span: span.end - span.begin)
        shown = sorted(longest, key=lambda span: (span.begin, -span.end))
    known = sorted(int(str(s.details["step"])) for s in spans if s.lane == _STEPS_LANE)
    return {
        "steps": [[int(str(s.details["step"])), (s.begin - begin) / 1e6, (s.end - begin) / 1e6] for s in steps],
        "known": [known[0], known[-1]],
        "seconds": (end - begin) / 1e6,
        "left_out": len(inside) - len(shown),
        "lanes": _lanes(shown, begin),
    }


def _lanes(spans: Sequence[Span], begin: int) -> list[dict[str, object]]:
    lanes: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        lanes[span.process, span.lane].append(span)
    found = []
    for (process, lane), own in sorted(lanes.items(), key=lambda item: (_place(item[0][0]), item[0])):
        drawn = [
            [span.name, (span.begin - begin) / 1e6, (span.end - span.begin) / 1e6, row, span.count, span.details]
            for span, row in rows(own)
        ]
        found.append({"process": process, "lane": lane, "spans": drawn, "rows": max(int(str(d[3])) for d in drawn) + 1})
    return found


def _place(process: str) -> int:
    return 0 if process == "driver" else 1 if "-rank" in process else 2


def _spans(run: Run) -> list[Span]:
    """Return the spans of all processes. Raises NotFound where there are none, or where a file leads elsewhere."""
    files = [run.path(path.relative_to(run.logs).as_posix()) for path in run.logs.glob(f"{SPANS_FOLDER}/*")]
    if not files:
        raise NotFound(f"{run.name}: no spans; a run records them unless monitor.timeline_mib=0")
    return _read(run.logs, tuple(sorted((str(file), file.stat().st_size) for file in files)))


@lru_cache(maxsize=4)
def _read(logs: Path, sizes: tuple[tuple[str, int], ...]) -> list[Span]:
    return read_spans(logs)
