"""What a recorded span costs the process that records it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from tools.bench.cpu import Scene
from tools.bench.figure import Figure
from tracing import record_spans, span

_SPANS, _REPEATS = 20_000, 5


def spans(scene: Scene) -> Iterator[Figure]:
    """Yield microseconds of one span with two details, on the disk and without recording (baseline)."""

    def cost(limit_mib: float) -> float:
        record_spans("bench", scene.folder, limit_mib=limit_mib)
        start = time.perf_counter()
        for number in range(_SPANS):
            with span("request", lane="generator-0") as one:
                one.note(tokens=number, end="stop")
        return (time.perf_counter() - start) / _SPANS * 1e6

    off, on = (statistics.median(cost(limit) for _ in range(_REPEATS)) for limit in (0.0, 8.0))
    record_spans("bench", scene.folder, limit_mib=0)
    yield Figure(
        name="spans.microseconds", value=on, unit="µs per span", baseline=off,
        target="at most 20: 0.5 % of a core that ends 250 requests a second",
    )  # fmt: skip
