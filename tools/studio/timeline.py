"""The spans of all processes in some steps, with the row in which each is drawn."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from tools.arguments import BadRequest
from tools.studio.folders import NotFound, Run
from tools.timeline import Span, chosen_steps, clipped, read_spans, rows
from tracing import FOLDER

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
    files = [run.path(path.relative_to(run.logs).as_posix()) for path in run.logs.glob(f"{FOLDER}/*")]
    if not files:
        raise NotFound(f"{run.name}: no spans; a run records them unless monitor.timeline_mib=0")
    return _read(run.logs, tuple(sorted((str(file), file.stat().st_size) for file in files)))


@lru_cache(maxsize=4)
def _read(logs: Path, sizes: tuple[tuple[str, int], ...]) -> list[Span]:
    return read_spans(logs)
