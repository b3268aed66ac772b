"""Checkpoints whose files try to run code: each file in turn, at every place that reads a checkpoint."""

import importlib
import io
import json
import os
import pickle
import shutil
from collections import OrderedDict
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
from model_specs.untrusted import UntrustedFileError

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


@pytest.mark.parametrize(
    ("what", "protocol"),
    [
        *((what, "pickle") for what in (".metadata", "common.pt", "metadata.json", "config.json", "__0_0.distcp")),
        *((what, "torch") for what in ("common.pt", "objects")),
    ],
)
def test_no_file_of_a_checkpoint_runs_code(ranks, whole, tmp_path, what, protocol) -> None:
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


def test_an_object_with_a_forbidden_class_is_refused_with_its_name(ranks, whole, tmp_path) -> None:
    model, source = whole
    shutil.copytree(source, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    (loaded,) = ranks.run(load_fails, 1, str(model), str(tmp_path / "checkpoint"))
    assert "names pathlib.Path.touch, which is no part of a checkpoint" in loaded
    _, _, err = convert(ranks, tmp_path / "checkpoint", tmp_path / "hf")
    assert "names pathlib.Path.touch, which is no part of a checkpoint" in err


def metadata_of(checkpoint: Path) -> Metadata:
    found: Metadata = load_plain((checkpoint / ".metadata").read_bytes())
    return found


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "", "..", "link.distcp", "pipe.distcp"])
def test_shards_lie_in_the_folder_of_the_checkpoint(whole: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    (tmp_path / "link.distcp").symlink_to(whole[1] / "__0_0.distcp")
    os.mkfifo(tmp_path / "pipe.distcp")
    metadata = metadata_of(whole[1])
    next(iter(metadata.storage_data.values())).relative_path = name
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError, match="no file of the checkpoint's folder"):
        RestrictedReader(tmp_path).read_metadata()


def built(module: str, name: str, state: object) -> bytes:
    """A pickle of one name, with state for what it names."""
    text = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name))
    return b"\x80\x04" + text + b"\x93" + pickle.dumps(state, protocol=4)[2:-1] + b"b."


@pytest.mark.parametrize("state", [(None, {"patched": "x"}), {"patched": "x"}], ids=["slots", "attributes"])
@pytest.mark.parametrize("name", ["PosixPath", "_get_layout", "Metadata", "Size"])
def test_state_for_a_class_or_a_function_is_refused_and_changes_nothing(name: str, state: object) -> None:
    places = {"PosixPath": "pathlib", "_get_layout": "torch.serialization", "Metadata": Metadata.__module__}
    module = places.get(name, "torch")
    with pytest.raises(pickle.UnpicklingError, match="it holds state for a"):
        load_plain(built(module, name, state))
    assert not hasattr(getattr(importlib.import_module(module), name), "patched")


class Shadowed(dict):  # type: ignore[type-arg]
    def __reduce__(self) -> Any:
        return OrderedDict, (), {"values": list}


def doubled(times: int) -> tuple[Any, ...]:
    value: tuple[Any, ...] = ()
    for _ in range(times):
        value = (value, value)
    return value


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: setattr(m, "storage_data", Shadowed()), "names collections.OrderedDict"),
        (lambda m: setattr(m, "storage_data", [1]), "no list of tensors"),
        (lambda m: setattr(m, "planner_data", doubled(60)), ""),
        (lambda m: setattr(m, "planner_data", {1, 2}), "opcode"),
        (lambda m: setattr(m, "other", 1), "state for a Metadata"),
        (lambda m: setattr(first_info(m), "offset", "0"), "a str in place of a int"),
        (lambda m: setattr(first_info(m), "offset", -1), "in a way that no checkpoint"),
        (lambda m: setattr(first_info(m), "relative_path", Path("x")), "a PosixPath in place of a str"),
        (lambda m: m.storage_data.update({"x": first_info(m)}), "a str in place of a MetadataIndex"),
        (lambda m: m.state_dict_metadata.update({"x": "y"}), "a str in place of a BytesStorageMetadata"),
    ],
)
def test_a_list_of_tensors_has_exactly_the_types_that_it_should_have(whole, tmp_path, change, said) -> None:
    metadata = metadata_of(whole[1])
    change(metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    if not said:
        RestrictedReader(tmp_path).read_metadata()
        return
    with pytest.raises(pickle.UnpicklingError, match=said):
        RestrictedReader(tmp_path).read_metadata()


def first_info(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data.values()))


def test_a_list_of_tensors_as_large_as_the_memory_is_refused(
    whole: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcore_adapter.checkpoint.restricted._MAX_LIST_BYTES", 1000)
    with pytest.raises(UntrustedFileError, match=r"\.metadata: larger than"):
        RestrictedReader(whole[1]).read_metadata()


@pytest.mark.parametrize("name", ["metadata.json", "common.pt", ".metadata", "config.json"])
def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(ranks, whole, tmp_path, name) -> None:
    shutil.copytree(whole[1], tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / name).unlink()
    os.mkfifo(tmp_path / "checkpoint" / name)
    status, _, err = convert(ranks, tmp_path / "checkpoint", tmp_path / "hf")
    assert status == 2 and ("a pipe or a device" in err or name == "metadata.json"), err


@pytest.mark.parametrize("name", ["metadata.json", "config.json"])
def test_deep_json_is_refused(ranks: RankPool, whole: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    shutil.copytree(whole[1], tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / name).write_text("[" * 100_000)
    status, _, err = convert(ranks, tmp_path / "checkpoint", tmp_path / "hf")
    assert status == 2 and "nested more than 100 deep" in err


def test_a_link_to_a_file_elsewhere_is_not_published(ranks: RankPool, whole: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(whole[1], tmp_path / "checkpoint")
    (tmp_path / "secret").write_text("secret")
    link = tmp_path / "checkpoint" / "special_tokens_map.json"
    link.symlink_to(tmp_path / "secret")
    status, _, err = convert(ranks, tmp_path / "checkpoint", tmp_path / "hf")
    assert status == 2 and "special_tokens_map.json: a link to" in err and not (tmp_path / "hf").exists()
    link.unlink()
    assert convert(ranks, tmp_path / "checkpoint", tmp_path / "hf")[0] == 0
