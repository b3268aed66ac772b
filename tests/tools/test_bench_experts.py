"""What updates of experts on one GPU are compared with, and when; the updates need GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tools.bench.figure import Figure
from tools.bench.gpu import experts as gpu_experts
from tools.bench.gpu import trainer as gpu
from tools.bench.gpu.experts import TRIED
from tools.bench.gpu.trainer import Scene
from tools.bench.gpu.widths import Measured, WidthsScene

RATES = {"grouped": 2.0, "stacked": 8.0, "auto": 6.0}


def measured(
    scene: Scene, length: int, count: int, sizes: tuple[int, ...], *, stacked: bool,
    settings: Mapping[str, Any] = MappingProxyType({"recompute": "selective"}),
) -> dict[int, Measured]:  # fmt: skip
    way = "auto" if settings["recompute"] == "auto" else "stacked" if stacked else "grouped"
    rate = RATES[way]
    return {
        size: Measured(tokens_per_second=rate, peak=rate * 1e9, held=0.0, parts={}, activations=None) for size in sizes
    }


def test_auto_is_compared_with_selective_recomputation_and_that_with_grouped_layers_and_megatrons_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_experts, "_measure", measured)
    monkeypatch.setattr(gpu_experts, "_megatron", lambda *args: (4.0, 5.0))
    found = {figure.name: figure for figure in gpu_experts.experts(Scene(folder=tmp_path))}
    for size in (64, 32):
        names = [f"update.experts_{size}{suffix}_tokens_per_second" for suffix in ("", "_auto", "_megatron")]
        assert [(found[name].value, found[name].baseline) for name in names] == [(8.0, 2.0), (6.0, 8.0), (8.0, 4.0)]
        assert found[f"memory.experts_{size}_auto"].target == "<= 90" and not found[f"memory.experts_{size}"].target
        assert found[f"memory.experts_{size}_megatron"].baseline == 5.0
    targets = [found[f"update.experts_{size}_mfu"].target for size in (64, 32)]
    assert targets == [">= 38, aim 45", ">= 30"]


def test_what_is_measured_has_rows_before_the_next_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*args: Any, **settings: Any) -> dict[int, Measured]:
        if "settings" in settings:
            raise SystemExit(143)  # the time is over
        return measured(*args, **settings)

    monkeypatch.setattr(gpu_experts, "_measure", measure)
    written: list[Figure] = []
    with pytest.raises(SystemExit):
        for figure in gpu_experts.experts(Scene(folder=tmp_path)):
            written.append(figure)
    assert {"memory.experts_64", "memory.experts_32"} <= {figure.name for figure in written}


def test_megatrons_loop_counts_with_its_fastest_step_as_the_result_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "measured_seconds", lambda device, step: step() or [3.0, 2.0, 4.0])
    rate, _ = gpu_experts._megatron(WidthsScene(folder=tmp_path, raw=TRIED), 32, 4, 64, ())
    assert rate == 128 / 2
