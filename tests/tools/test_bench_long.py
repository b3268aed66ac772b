"""What updates on long sequences are compared with; their figures need GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.bench.gpu import long as gpu_long
from tools.bench.gpu.trainer import Scene
from tools.bench.gpu.widths import Measured


def measured(rate: float) -> Measured:
    return Measured(tokens_per_second=rate, peak=rate * 1e9, held=0.0, parts={}, activations=None)


def test_host_memory_is_compared_with_none_and_the_shorter_sequence_with_full_recomputation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(scene: Scene, length: int, **settings: Any) -> Measured:
        rates = {"auto": 8.0, "full": 2.0}
        return measured(rates[settings["recompute"]] / (2 if settings.get("recompute_host_gib") == 0.0 else 1))

    monkeypatch.setattr(gpu_long, "_measure", measure)
    found = {figure.name: (figure.value, figure.baseline) for figure in gpu_long.long(Scene(folder=tmp_path))}
    short, long = (64, 128)
    assert found[f"long.4B_{short}_tokens_per_second"] == (8.0, 2.0)
    assert found[f"long.4B_{long}_tokens_per_second"] == (8.0, 4.0)
    assert found[f"memory.long.4B_{long}"] == (8.0, 4.0)


def test_a_length_that_does_not_fit_has_no_row_and_one_without_baseline_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(scene: Scene, length: int, **settings: Any) -> Measured | None:
        return measured(8.0) if settings["recompute"] == "auto" and length == 64 else None

    monkeypatch.setattr(gpu_long, "_measure", measure)
    found = {figure.name: figure.baseline for figure in gpu_long.long(Scene(folder=tmp_path))}
    assert found["long.4B_64_tokens_per_second"] is None
    assert not any("128" in name for name in found)


def test_the_shorter_sequence_has_rows_before_the_longer_one_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(scene: Scene, length: int, **settings: Any) -> Measured:
        if length != 64:
            raise SystemExit(143)  # the time is over
        return measured(8.0)

    monkeypatch.setattr(gpu_long, "_measure", measure)
    written = []
    with pytest.raises(SystemExit):
        for figure in gpu_long.long(Scene(folder=tmp_path)):
            written.append(figure.name)
    assert "memory.long.4B_64" in written
