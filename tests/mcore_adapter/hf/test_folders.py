"""Folders of weights without a model: how one takes its place, and how two are compared."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_adapter.checkpoint.streaming import different_tensors
from mcore_adapter.hf.safetensors_folder import TensorSpec, replacing_folder


@pytest.mark.parametrize("replaces", [False, True])
def test_a_written_folder_has_the_usual_mode_and_nothing_is_left_beside_it(tmp_path: Path, replaces: bool) -> None:
    target, usual = tmp_path / "model", tmp_path / "usual"
    usual.mkdir()
    if replaces:
        target.mkdir()
        (target / "old").write_text("")
    with replacing_folder(target) as folder:
        (folder / "config.json").write_text("{}")
    assert target.stat().st_mode == usual.stat().st_mode
    usual.rmdir()
    assert [path.name for path in target.iterdir()] == ["config.json"] and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("row", [None, 0, 1])
def test_a_difference_in_any_part_of_a_large_tensor_is_found(row: int | None) -> None:
    mine = torch.zeros(2, 4 << 20)  # 16 MiB a row: two parts
    other = mine.clone()
    if row is not None:
        other[row, -1] = -0.0  # equal as a number, another one in bytes
    model: Any = SimpleNamespace(
        specs={"w": TensorSpec(torch.float32, (2, 4 << 20))}, read_stored=lambda stored, name: mine
    )
    folder: Any = SimpleNamespace(
        shape=lambda name: tuple(other.shape), read=lambda name, dim, start, stop: other[start:stop]
    )
    checked: list[int] = []
    different = different_tensors(SimpleNamespace(), folder, model, torch.float32, checked.append)  # type: ignore[arg-type]
    assert different == ([] if row is None else ["w"]) and checked == [32 << 20]
