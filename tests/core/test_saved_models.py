"""How many saved models a trial keeps."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from core.experiments.context import has_model, save_model


def save(folder: Path, step: int, keep: int | None) -> None:
    def save_hf(engine: str, target: str, tokenizer_from: str) -> None:
        Path(target).mkdir(parents=True)
        (Path(target) / "config.json").write_text("{}")

    group = SimpleNamespace(save_hf=save_hf)
    engines: Any = [SimpleNamespace(name=name, group=group) for name in ("actor", "critic")]
    save_model(engines, folder, f"epoch1epochstep{step}globalstep{step}", "tokenizer", keep=keep)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("globalstep")[2]) for path in folder.glob("epoch*"))


def test_the_newest_models_of_each_engine_are_kept_and_nothing_else_is_deleted(tmp_path, caplog) -> None:
    for step in (8, 9, 10):
        save(tmp_path, step, keep=None)
    assert steps(tmp_path / "actor") == steps(tmp_path / "critic") == [8, 9, 10]
    (tmp_path / "actor" / "epoch-notes").mkdir()
    (tmp_path / "actor" / "mine").mkdir()
    with caplog.at_level(logging.INFO):
        save(tmp_path, 11, keep=2)
    (tmp_path / "actor" / "epoch-notes").rmdir()
    assert steps(tmp_path / "actor") == steps(tmp_path / "critic") == [10, 11]
    assert (tmp_path / "actor" / "mine").exists()
    assert f"Deleted {tmp_path}/actor/epoch1epochstep8globalstep8 (exp_ctrl.save_keep=2)" in caplog.text


def test_a_model_is_there_when_every_engine_has_it(tmp_path: Path) -> None:
    engines: Any = [SimpleNamespace(name=name) for name in ("actor", "critic")]
    name = "epoch1epochstep8globalstep8"
    assert not has_model(engines, tmp_path, name)
    save(tmp_path, 8, keep=None)
    assert has_model(engines, tmp_path, name)
    (tmp_path / "critic" / name).rename(tmp_path / "critic" / "epoch1epochstep9globalstep9")
    assert not has_model(engines, tmp_path, name)
