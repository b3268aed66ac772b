"""What an update is compared with: the faster of Megatron's own loops; the loops need GPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tools.bench.gpu import trainer as gpu
from tools.bench.gpu.trainer import Scene


def test_an_update_is_compared_with_the_faster_of_megatrons_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def world() -> Iterator[tuple[Any, Any]]:
        yield None, SimpleNamespace(empty_cache=lambda: None)

    def bare(*args: Any, recompute: str, fused: Collection[str]) -> tuple[float, float]:
        return {("none", True): (5.0, 70.0), ("none", False): (4.0, 60.0), ("full", True): (2.0, 50.0)}.get(
            (recompute, "weight_gradients" in fused), (3.0, 40.0)
        )

    monkeypatch.setattr(gpu, "query_gpus", lambda: ["a GPU"])
    monkeypatch.setattr(gpu, "trainer_world", world)
    monkeypatch.setattr(gpu, "random_batch", lambda *args: None)
    monkeypatch.setattr(gpu, "bare_rate", bare)
    monkeypatch.setattr(gpu, "update_rate", lambda *args: (6.0, 30.0))
    found = {figure.name: figure.baseline for figure in gpu.update(Scene(folder=tmp_path))}
    assert found["update.1.5B_2048_tokens_per_second"] == 5.0 and found["memory.update_1.5B_2048"] == 70.0
    assert found["update.1.5B_16384_tokens_per_second"] == 3.0 and found["memory.update_1.5B_16384"] == 40.0


def test_a_loop_that_runs_out_of_memory_is_no_baseline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def bare(*args: Any, fused: Collection[str]) -> tuple[float, float]:
        if fused:
            raise torch.OutOfMemoryError("no memory")
        return 4.0, 60.0

    monkeypatch.setattr(gpu, "bare_rate", bare)
    world = (Scene(folder=tmp_path), None, SimpleNamespace(empty_cache=lambda: None), None, 64)
    assert gpu.fastest_bare_rate(*world, choices=[(), ("weight_gradients",)]) == (4.0, 60.0)
    assert gpu.fastest_bare_rate(*world, choices=[("weight_gradients",)]) is None
