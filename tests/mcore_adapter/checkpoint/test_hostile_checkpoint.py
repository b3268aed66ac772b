"""Checkpoints whose files try to run code: each file in turn, at every place that reads a checkpoint."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from allocation import ParallelLayout
from helpers.mcore_ranks import Rank, RankPool
from helpers.saved_models import convert, load_run, save_run
from helpers.tiny_models import write_model
from mcore_adapter.checkpoint.restricted import RestrictedReader, load_plain

ALONE = ParallelLayout()


class Touch:
    """Unpickled without restriction, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model's folder, and a checkpoint of its engine."""
    folder = tmp_path_factory.mktemp("hostile")
    write_model("qwen2_tied", folder / "model")
    (folder / "model" / "tokenizer_config.json").write_text("{}")
    ranks.run(save_run, 1, ALONE, str(folder / "model"), str(folder / "checkpoint"), "float32")
    return folder / "model", folder / "checkpoint"


def load_fails(rank: Rank, model: str, path: str) -> str:
    try:
        load_run(rank, ALONE, model, path, "float32")
    except Exception as error:  # noqa: BLE001 (whichever reader is first)
        return f"{type(error).__name__}: {error}"
    return "loaded"


def replace_objects(folder: Path, bomb: bytes) -> None:
    """Put `bomb` in place of every stored object (the random states) of a checkpoint."""
    metadata = load_plain((folder / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.offset is None:
            with open(folder / info.relative_path, "ab") as shard:
                info.offset, info.length = shard.tell(), len(bomb)
                shard.write(bomb)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("what", [".metadata", "common.pt", "metadata.json", "config.json", "__0_0.distcp", "objects"])
@pytest.mark.parametrize("protocol", ["pickle", "torch"])
def test_no_file_of_a_checkpoint_runs_code(
    ranks: RankPool, whole: tuple[Path, Path], tmp_path: Path, what: str, protocol: str
) -> None:
    model, source = whole
    folder, touched = tmp_path / "checkpoint", tmp_path / "touched"
    shutil.copytree(source, folder)
    bomb = pickle.dumps(Touch(touched)) if protocol == "pickle" else saved(Touch(touched))
    if what == "objects":
        replace_objects(folder, bomb)
    else:
        (folder / what).write_bytes(bomb)
    (loaded,) = ranks.run(load_fails, 1, str(model), str(folder))
    assert loaded != "loaded" or what == "config.json", "the engine reads that of its model"
    status, _, err = convert(ranks, folder, tmp_path / "hf")
    assert status == (0 if what == "objects" else 2), err
    assert not touched.exists()


def test_the_list_of_files_is_complete(whole: tuple[Path, Path]) -> None:
    text_only = ["config.json", "generation_config.json", "metadata.json", "tokenizer_config.json"]
    assert set(files_of(whole[1])) - set(text_only) == {".metadata", "__0_0.distcp", "common.pt"}
    for name in text_only:
        if (whole[1] / name).exists():
            json.loads((whole[1] / name).read_bytes())


def test_an_object_with_a_forbidden_class_is_refused_with_its_name(
    ranks: RankPool, whole: tuple[Path, Path], tmp_path: Path
) -> None:
    model, source = whole
    shutil.copytree(source, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    (loaded,) = ranks.run(load_fails, 1, str(model), str(tmp_path / "checkpoint"))
    assert "names pathlib.Path.touch, which is no part of a checkpoint" in loaded
    _, _, err = convert(ranks, tmp_path / "checkpoint", tmp_path / "hf")
    assert "names pathlib.Path.touch, which is no part of a checkpoint" in err


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "", ".."])
def test_shards_lie_in_the_folder_of_the_checkpoint(whole: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    metadata = load_plain((whole[1] / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = name
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError, match="no file of the checkpoint's folder"):
        RestrictedReader(tmp_path).read_metadata()


@pytest.mark.parametrize("name", ["Metadata.__init__", "system", "os.system", "load"])
def test_a_class_is_named_in_full_or_not_at_all(name: str) -> None:
    module = Metadata.__module__ if name.startswith("Metadata") else "torch"
    text = [b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name)]
    with pytest.raises(pickle.UnpicklingError, match="no part of a checkpoint"):
        load_plain(b"\x80\x04" + b"".join(text) + b"\x93.")
