"""What a recorded span costs the process that records it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator

from tools.bench.cpu import Scene
from tools.bench.figure import Figure
from tracing import record_spans, span

_SPANS, _REPEATS = 20_000, 5
_OF_A_TURN = 8
"""The answers of a group, which end together."""


def spans(scene: Scene) -> Iterator[Figure]:
    """Yield microseconds of one span with two details, on the disk and without recording (baseline): alone, and in an
    event loop, where those that end in one turn are written together."""

    def alone(limit_mib: float) -> float:
        record_spans("bench", scene.folder, limit_mib=limit_mib)
        start = time.perf_counter()
        for number in range(_SPANS):
            _request(number)
        return (time.perf_counter() - start) / _SPANS * 1e6

    async def together() -> float:
        start = time.perf_counter()
        for number in range(_SPANS):
            _request(number)
            if number % _OF_A_TURN == _OF_A_TURN - 1:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        return (time.perf_counter() - start) / _SPANS * 1e6

    def in_event_loop(limit_mib: float) -> float:
        record_spans("bench", scene.folder, limit_mib=limit_mib)
        return asyncio.run(together())

    for name, cost in (("microseconds", alone), ("microseconds_in_event_loop", in_event_loop)):
        off, on = (statistics.median(cost(limit) for _ in range(_REPEATS)) for limit in (0.0, 8.0))
        record_spans("bench", scene.folder, limit_mib=0)
        yield Figure(
            name=f"spans.{name}", value=on, unit="µs per span", baseline=off,
            target="at most 20: 0.5 % of a core that ends 250 requests a second",
        )  # fmt: skip


def _request(number: int) -> None:
    with span("request", lane="generator-0") as one:
        one.note(tokens=number, end="stop")
