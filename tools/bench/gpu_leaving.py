"""The measurement `leaving` of `python -m tools.bench gpu`: memory that critic and reference keep on a GPU while
servers sample on it, and the time to move them to the host and back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from tools.bench.figure import Figure
from tools.bench.gpu import Scene, free, make_engine, ppo_update, random_batch, seconds_of, trainer_world
from tools.bench.gpu_memory import GB

_TURNS = 4
"""In the first one host memory is allocated; its times do not count."""


def leaving(scene: Scene) -> Iterator[Figure]:
    """Yield GB on the GPU while the model is away, against those while it is there, and milliseconds. One GPU."""
    with trainer_world() as (parallel, device):
        for role in ("critic", "reference"):
            trains = role == "critic"  # a language model in its place holds the same but for the head
            engine = make_engine(scene, parallel, device, trains=trains)
            if trains:
                ppo_update(engine, random_batch(scene, [2048]), 2048)
            held, away, seconds = 0.0, 0.0, []
            for _ in range(_TURNS):
                held = _allocated(device)
                out = seconds_of(device, partial(engine.offload, weights=True))
                away = _allocated(device)
                seconds.append((out, seconds_of(device, engine.reload)))
            del engine
            free(device)
            yield Figure(name=f"memory.{role}_{scene.shape}_away", value=away, unit="GB", baseline=held, target="")
            for label, median in zip(("goes", "comes_back"), 1e3 * np.median(seconds[1:], axis=0), strict=True):
                name = f"leaving.{role}_{scene.shape}_{label}"
                yield Figure(name=name, value=float(median), unit="ms", baseline=None, target="")


def _allocated(device: Any) -> float:
    device.empty_cache()
    return float(device.memory_stats()["allocated_gib"]) * 2**30 / GB
