"""`python -m tools.bench cpu --only sandbox`: calls of the sandbox for model-written code."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollout.sandbox.pool import LEVELS, Sandbox, SandboxError, SandboxSettings
from tools.bench import Figure

_CODE = "total = sum(n * n for n in range({}))\nprint(total)"
_SECONDS = 5.0


def calls(scene: Any) -> Iterator[Figure]:
    """Yield calls per second at each level that the host allows, beside those of `python -c`, as many at a time."""
    num_workers = os.cpu_count() or 1
    baseline = _per_second(lambda number: _new_interpreter(_CODE.format(number)), num_workers)
    for level in LEVELS:
        sandbox = Sandbox(SandboxSettings(level=level, num_workers=num_workers))
        try:
            assert sandbox.level == level
        except SandboxError:
            continue
        value = _per_second(lambda number: sandbox.run(_CODE.format(number)).output, num_workers)  # noqa: B023
        sandbox.close()
        target = ">= 500 on 2 cores"
        yield Figure(name=f"sandbox.{level}", value=value, unit="calls/s", baseline=baseline, target=target)


def _per_second(call: Any, num_threads: int) -> float:
    """Return how often `num_threads` threads call in a second. Raises AssertionError on a wrong result."""
    begin = time.perf_counter()

    def work(first: int) -> int:
        done = 0
        while time.perf_counter() - begin < _SECONDS:
            number = first + done % 100
            assert call(number) == f"{sum(n * n for n in range(number))}\n"
            done += 1
        return done

    with ThreadPoolExecutor(num_threads) as threads:
        total = sum(threads.map(work, range(num_threads)))
    return total / (time.perf_counter() - begin)


def _new_interpreter(code: str) -> str:
    return subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True).stdout
