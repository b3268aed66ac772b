"""Memory of a run's processes, for the metrics of each step."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Mapping

PREFIX = "memory/"
DRIVER, ROLLOUT, TRAINER, TRAINER_GPU = (
    f"{PREFIX}{name}_gib" for name in ("driver", "rollout", "trainer", "trainer_gpu")
)


def peak_gib() -> float:
    """Return the largest resident size of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def split_memory(of_ranks: Iterable[dict[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Return (metrics of the first rank without memory, the largest figure of all ranks by name of memory)."""
    every = list(of_ranks)
    memory = largest({k: v for k, v in metrics.items() if k.startswith(PREFIX)} for metrics in every)
    return {k: v for k, v in every[0].items() if k not in memory}, memory


def largest(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest value of each name."""
    result: dict[str, float] = {}
    for each in figures:
        for name, value in each.items():
            result[name] = max(value, result.get(name, value))
    return result
