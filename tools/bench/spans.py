"""What a recorded span costs the process that records it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator

from tools.bench.cpu import Scene
from tools.bench.figure import Figure
from tracing import frequent_span, record_spans, span, write_pending

_SPANS, _REPEATS = 20_000, 5
_OF_A_TURN = 8
"""The answers of a group, which end together."""
_PER_SECOND, _TURNS_PER_SECOND, _SECONDS = (250, 7000), 100, 3
"""Requests, as many as a run with long answers has and as one with the shortest, and how often some of them end."""


def spans(scene: Scene) -> Iterator[Figure]:
    """Yield microseconds of one span with two details, on the disk and without recording (baseline): alone, and in an
    event loop, where they are written together. Then the share of a core that requests take which
    end at given rates, with sampling, against none at all."""

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
        write_pending()
        return (time.perf_counter() - start) / _SPANS * 1e6

    def in_event_loop(limit_mib: float) -> float:
        record_spans("bench", scene.folder, limit_mib=limit_mib)
        return asyncio.run(together())

    for name, cost in (("microseconds", alone), ("microseconds_in_event_loop", in_event_loop)):
        off, on = (statistics.median(cost(limit) for _ in range(_REPEATS)) for limit in (0.0, 8.0))
        record_spans("bench", scene.folder, limit_mib=0)
        yield Figure(
            name=f"spans.{name}", value=on, unit="µs per span", baseline=off,
            target="<= 20",
        )  # fmt: skip
    for rate in _PER_SECOND:
        with_spans, without = [], []
        for _ in range(_REPEATS):
            record_spans("bench", scene.folder, limit_mib=8.0)
            with_spans.append(asyncio.run(_paced(rate, _frequent)))
            record_spans("bench", scene.folder, limit_mib=0)
            without.append(asyncio.run(_paced(rate, lambda number: None)))
        yield Figure(
            name=f"spans.share_at_{rate}_requests_per_second",
            value=100 * (min(with_spans) - min(without)) / _SECONDS,
            unit="% of a core", baseline=None, target="<= 0.5",
        )  # fmt: skip


async def _paced(rate: int, request: Callable[[int], None]) -> float:
    """Return the seconds of the processor that so many requests a second take, the writing of their spans included."""
    cpu, begin = time.thread_time(), time.perf_counter()
    for turn in range(_SECONDS * _TURNS_PER_SECOND):
        for number in range(rate * turn // _TURNS_PER_SECOND, rate * (turn + 1) // _TURNS_PER_SECOND):
            request(number)
        await asyncio.sleep(max(0.0, begin + (turn + 1) / _TURNS_PER_SECOND - time.perf_counter()))
    write_pending()
    return time.thread_time() - cpu


def _request(number: int) -> None:
    with span("request", lane="generator-0") as one:
        one.note(tokens=number, end="stop")


def _frequent(number: int) -> None:
    with frequent_span("request", lane="generator-0") as one:
        one.note(tokens=number, end="stop")
