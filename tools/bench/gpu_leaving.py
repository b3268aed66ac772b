"""The measurement `leaving` of `python -m tools.bench gpu`: what critic and reference leave of a GPU while servers
sample on it, and how long they take to go and to come back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mcore_adapter.settings import EngineSettings
from tools.bench.figure import Figure
from tools.bench.gpu import Scene, free, make_engine, ppo_update, random_batch, seconds_of, trainer_world
from tools.bench.gpu_memory import GB

_TURNS = 4
"""The first takes the host memory."""


def leaving(scene: Scene) -> Iterator[Figure]:
    """Yield GB on the GPU while the model is away, against those while it is there, and milliseconds. One GPU."""
    with trainer_world() as (parallel, device):
        for role in ("critic", "reference"):
            engine = _engine(scene, parallel, device, trains=role == "critic")
            if role == "critic":
                ppo_update(engine, random_batch(scene, [2048]), 2048)
            held, away, seconds = 0.0, 0.0, []
            for _ in range(_TURNS):
                held = _allocated(device)
                out = seconds_of(device, lambda engine=engine: engine.offload(weights=True))  # type: ignore[misc]
                away = _allocated(device)
                seconds.append((out, seconds_of(device, engine.reload)))
            del engine
            free(device)
            yield Figure(
                name=f"memory.{role}_{scene.shape}_away", value=away, unit="GB", baseline=held, target="<= 0.02x"
            )
            for label, median in zip(("goes", "comes_back"), 1e3 * np.median(seconds[1:], axis=0), strict=True):
                yield Figure(
                    name=f"leaving.{role}_{scene.shape}_{label}", value=float(median), unit="ms", baseline=None, target=""
                )  # fmt: skip


def _engine(scene: Scene, parallel: Any, device: Any, *, trains: bool) -> Any:
    """Return a model with an optimizer, or one for passes alone. The critic's is a language model: they hold the same
    but for their heads."""
    if trains:
        return make_engine(scene, parallel, device)
    from mcore_adapter.engine import MegatronEngine

    settings = EngineSettings(hf_path=str(scene.model), init_from_scratch=True, dtype="bfloat16")
    return MegatronEngine(parallel=parallel, device=device, settings=settings, optimizer=None)


def _allocated(device: Any) -> float:
    device.empty_cache()
    return float(device.memory_stats()["allocated_gib"]) * 2**30 / GB
