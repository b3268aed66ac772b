"""Write what every process of a run did in its last steps as one trace and one picture.

    python -m tools.timeline RUN                     # timeline.json and timeline.png in RUN, of the last 3 steps
    python -m tools.timeline RUN --step 40..45 --output FOLDER

RUN is the log folder of a run, {fileroot}/logs/<user>/<experiment>/<trial>, or any folder above it with one run.
timeline.json is in Chrome's trace format: open it at https://ui.perfetto.dev or chrome://tracing. The table has seconds
of each kind of span per step, and the share of the time in which at least one ran. A recorded request may stand for
several (detail "of"); all of them are counted, and the share is of the recorded ones. Runs record spans unless
monitor.timeline_mib=0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tools.arguments import BadRequest, integer, new_folder, parser_of, refused, run_with, step_range
from tracing import EARLIER, FOLDER, OF

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DRIVER, _STEPS = "driver", "steps"


@dataclass(frozen=True, kw_only=True)
class Span:
    """One span; times in microseconds of the clock of its host."""

    process: str
    lane: str
    name: str
    begin: int
    end: int
    details: dict[str, object] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of spans that it stands for, where spans are sampled."""
        return int(str(self.details.get(OF, 1)))


def main(argv: Sequence[str] | None = None) -> int:
    """Write trace, picture and table; return the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        run = run_with(arguments.run, FOLDER, without="it needs monitor.timeline_mib > 0")
        spans = read_spans(run)
        steps = chosen_steps(spans, arguments.step, arguments.steps)
        window = (min(s.begin for s in steps), max(s.end for s in steps))
        spans = clipped(spans, window)
        folder = arguments.output or run
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "timeline.json").write_text(json.dumps(chrome_trace(spans)))
        draw(spans, window, folder / "timeline.png")
    except (BadRequest, OSError) as error:
        return refused(error)
    console = Console()
    console.print(table(spans, window, len(steps)))
    console.print(f"{folder / 'timeline.json'}\n{folder / 'timeline.png'}", soft_wrap=True, highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("tools.timeline", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="log folder of a run")
    parser.add_argument("--step", type=step_range, metavar="N[..M]", help="steps to show")
    parser.add_argument("--steps", type=integer(least=1), default=3, metavar="N", help="so many last steps; default: 3")
    parser.add_argument("--output", type=new_folder, metavar="FOLDER", help="where to write; default: RUN")
    return parser


def read_spans(run: Path) -> list[Span]:
    """Return the spans of all processes of a run, in the order of their begin."""
    files = sorted((run / FOLDER).glob(f"*{EARLIER}")) + sorted((run / FOLDER).glob("*.jsonl"))
    return sorted((span for file in files for span in _spans_of(file)), key=lambda span: (span.begin, -span.end))


def _spans_of(file: Path) -> Iterator[Span]:
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
            if isinstance(row, list):
                name, lane, begin, duration, details = row
                yield Span(process=file.stem, lane=lane, name=name, begin=begin, end=begin + duration, details=details)
        except ValueError:
            continue  # the end of a process that was killed, or of a full disk


def chosen_steps(spans: Sequence[Span], chosen: range | None, num_last: int) -> list[Span]:
    """Return the spans of the steps to show: those of `chosen`, else the last `num_last`. A step that was trained again
    after a recovery counts with its last time. Raises BadRequest."""
    steps = {int(str(s.details["step"])): s for s in spans if (s.process, s.lane) == (_DRIVER, _STEPS)}
    if not steps:
        raise BadRequest("no step has finished yet")
    found = [steps[number] for number in sorted(steps) if chosen is None or number in chosen]
    if not found:
        raise BadRequest(f"--step: there are spans of the steps {min(steps)}..{max(steps)}; name some of these")
    return found if chosen is not None else found[-num_last:]


def clipped(spans: Sequence[Span], window: tuple[int, int]) -> list[Span]:
    """Return the spans that overlap the window."""
    return [span for span in spans if span.begin < window[1] and span.end > window[0]]


def chrome_trace(spans: Sequence[Span]) -> dict[str, object]:
    """Return the spans in Chrome's trace format: a process for each process of the run, a thread for each lane; spans
    of a lane that overlap without one inside the other get further threads."""
    events: list[dict[str, object]] = []
    for pid, process in enumerate(_processes(spans), start=1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        threads: dict[tuple[str, int], int] = {}
        for span, row in rows([s for s in spans if s.process == process]):
            tid = threads.setdefault((span.lane, row), len(threads) + 1)
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.lane or "calls",
                    "pid": pid,
                    "tid": tid,
                    "ts": span.begin,
                    "dur": span.end - span.begin,
                    "args": span.details,
                }
            )
        events += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane or "calls"}}
            for (lane, _), tid in threads.items()
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def rows(spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """Yield each span with its row in its lane: the first in which it lies beside all others or inside one of them."""
    open_ends: dict[str, list[list[int]]] = defaultdict(list)
    for span in spans:
        lane = open_ends[span.lane]
        for row, ends in enumerate(lane):
            while ends and ends[-1] <= span.begin:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                ends.append(span.end)
                yield span, row
                break
        else:
            lane.append([span.end])
            yield span, len(lane) - 1


def _processes(spans: Sequence[Span]) -> list[str]:
    """Return the names of the processes: driver, then trainers, then the rest."""

    def place(name: str) -> tuple[int, str]:
        return (0 if name == _DRIVER else 1 if "-rank" in name else 2, name)

    return sorted({span.process for span in spans}, key=place)


def table(spans: Sequence[Span], window: tuple[int, int], num_steps: int) -> Table:
    """Return seconds per step and share of the time by process and name."""
    shown = Table(title=f"{num_steps} steps, {(window[1] - window[0]) / 1e6 / num_steps:.3f} s each")
    for name in ("process", "span"):
        shown.add_column(name)
    for name in ("number", "s/step", "busy"):
        shown.add_column(name, justify="right")
    kinds: dict[tuple[str, str, str], list[Span]] = defaultdict(list)
    for span in spans:
        inside = replace(span, begin=max(span.begin, window[0]), end=min(span.end, window[1]))
        kinds[span.process, span.lane, span.name].append(inside)
    for process in _processes(spans):
        for kind in sorted(kind for kind in kinds if kind[0] == process and kind[1] != _STEPS):
            (_, lane, name), own = kind, kinds[kind]
            seconds = sum((s.end - s.begin) * s.count for s in own) / 1e6
            share = covered([(s.begin, s.end) for s in own]) / (window[1] - window[0])
            label, number = f"{lane}: {name}" if lane else name, sum(s.count for s in own)
            least = "≥ " if any(s.count > 1 for s in own) else ""
            shown.add_row(process, label, str(number), f"{seconds / num_steps:.3f}", f"{least}{share:.0%}")
            process = ""
    return shown


def covered(times: Sequence[tuple[int, int]]) -> int:
    """Return the length of the union of intervals."""
    total, last = 0, 0
    for begin, end in sorted(times):
        total += max(0, end - max(begin, last))
        last = max(last, end)
    return total


def draw(spans: Sequence[Span], window: tuple[int, int], path: Path) -> None:
    """Draw one line for each lane of each process: the spans that are not inside another one, by colour; of lanes whose
    spans overlap, how many run."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = [
        (process, lane)
        for process in _processes(spans)
        for lane in sorted({s.lane for s in spans if s.process == process} - {_STEPS})
    ]
    figure = Figure(figsize=(14, 0.8 + 0.55 * len(lanes)), layout="constrained")
    axes = figure.subplots(len(lanes), 1, sharex=True, squeeze=False)
    names = sorted({s.name for s in spans if s.lane != _STEPS})
    colours = dict(zip(names, colormaps["tab20"].colors * (len(names) // 20 + 1), strict=False))  # type: ignore[attr-defined]
    drawn: set[str] = set()
    for ax, (process, lane) in zip(axes[:, 0], lanes, strict=True):
        of_lane = [s for s in spans if (s.process, s.lane) == (process, lane)]
        drawn |= _draw_lane(ax, of_lane, window, colours)
        for step in spans:
            if step.lane == _STEPS:
                ax.axvline((step.end - window[0]) / 1e6, color="0.6", linewidth=0.6)
        ax.set_ylabel(f"{process}\n{lane}" if lane else process, rotation=0, ha="right", va="center", fontsize=8)
        ax.set_xlim(0, (window[1] - window[0]) / 1e6)
        ax.spines[["top", "right", "left"]].set_visible(False)
    axes[-1, 0].set_xlabel("seconds; vertical lines: ends of steps")
    handles = [Patch(color=colours[name]) for name in sorted(drawn)]
    figure.legend(handles, sorted(drawn), loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def _draw_lane(
    ax: Axes, spans: Sequence[Span], window: tuple[int, int], colours: dict[str, tuple[float, float, float]]
) -> set[str]:
    """Return the names that have been drawn by colour."""
    placed = list(rows(spans))
    if max(row for _, row in placed) > 0 or any(s.count > 1 for s in spans):
        changes = sorted([(s.begin, s.count) for s in spans] + [(s.end, -s.count) for s in spans])
        times, running, now = [0.0], [0], 0
        for time, change in changes:
            now += change
            times.append(max(0, time - window[0]) / 1e6)
            running.append(now)
        ax.fill_between(times, running, step="post", color=colours[spans[0].name], linewidth=0)
        ax.set_ylim(0)
        ax.tick_params(axis="y", labelsize=7)
        return {spans[0].name}
    outer, end = [], 0
    for span in spans:
        if span.begin >= end:
            outer.append(span)
            end = span.end
    for span in outer:
        ax.barh(0, (span.end - span.begin) / 1e6, left=(span.begin - window[0]) / 1e6, color=colours[span.name])
    ax.set_yticks([])
    return {span.name for span in outer}


if __name__ == "__main__":
    sys.exit(main())
