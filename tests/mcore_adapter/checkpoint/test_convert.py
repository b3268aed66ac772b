"""tools/convert.py: checkpoints of every layout and family to Hugging Face folders and back."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from allocation import ParallelLayout
from core.runs.checkpoints import seal
from helpers.mcore_ranks import EXPERT_LAYOUTS, Rank, RankPool
from helpers.saved_models import assert_same_bytes, convert, run_convert, tensors_of, write_checkpoint
from helpers.tiny_models import MODELS, write_model

CONFIG_CHANGES = {
    "unknown architecture": {"model_type": "gpt2"},
    "shapes": {"intermediate_size": 50},
    "no space": {"vocab_size": 2 * 10**9},
    "checkpoint of another shape": {"num_hidden_layers": 2},
}
RARELY = ("qwen2", "llama2", "mistral", "llama3_tied")
"""Families whose tensors have the names and cuts of others."""


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen2_tied", ParallelLayout(tp=2, pp=2)),
        ("qwen2_tied", ParallelLayout(pp=2, vpp=2)),
        ("qwen3_moe", EXPERT_LAYOUTS["dp2 pp2 ep2"]),
        ("deepseek_v3", EXPERT_LAYOUTS["tp2 ep2"]),
    ],
    ids=str,
)
def test_a_checkpoint_of_any_layout_becomes_the_model_that_it_holds(
    ranks: RankPool, model_folders: Any, tmp_path: Path, name: str, layout: ParallelLayout
) -> None:
    source, model = model_folders[name]
    ranks.run(write_checkpoint, layout.world_size, layout, source, tmp_path / "checkpoint", {})
    status, out, err = convert(ranks, tmp_path / "checkpoint", tmp_path / "hf", "--check")
    assert (status, err) == (0, "") and "byte-equal" in out
    assert_same_bytes(tensors_of(source), tensors_of(tmp_path / "hf"))
    assert (tmp_path / "hf" / "generation_config.json").exists()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in RARELY else name for name in MODELS]
)
def test_there_and_back_is_byte_equal_for_every_family(ranks: RankPool, tmp_path: Path, name: str) -> None:
    write_model(name, tmp_path / "hf", dtype=torch.bfloat16)
    status, out, err = convert(ranks, tmp_path / "hf", tmp_path / "megatron", "--to-megatron", "--check")
    assert (status, err) == (0, "") and "byte-equal" in out
    assert convert(ranks, tmp_path / "megatron", tmp_path / "again", "--check")[0] == 0
    assert_same_bytes(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "again"))
    before, after = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("hf", "again"))
    assert after == before


def loaded(rank: Rank, layout: ParallelLayout, checkpoint: Path, target: Path) -> None:
    """What an engine of `layout` makes of a converted checkpoint, as a Hugging Face folder."""
    from mcore_adapter.checkpoint.checkpoint import load_checkpoint
    from mcore_adapter.hf.weights import init_from_scratch, save_hf
    from mcore_adapter.models.gpt import build_model
    from model_specs.families import read_config

    with rank.joined(layout) as (parallel, device):
        chunks = build_model(read_config(checkpoint), parallel=parallel, device=device, dtype=torch.float32)
        init_from_scratch(chunks, parallel=parallel, seed=3)
        load_checkpoint(checkpoint, chunks, None, parallel=parallel)
        save_hf(chunks, target, parallel=parallel)


@pytest.mark.parametrize(
    ("name", "written_as", "files", "read_as"),
    [
        ("qwen2_tied", "d1m2p2", 4, ParallelLayout(dp=2)),
        ("llama", "d2m1p1", 1, ParallelLayout(tp=2, pp=2)),
        ("deepseek_v3", "d1m2p2e2", 4, ParallelLayout(pp=2)),
        ("qwen3_moe", "(attn:d1m2p1|ffn:d1m1p1e2)", 2, EXPERT_LAYOUTS["dp2 ep2"]),
    ],
)
def test_a_checkpoint_is_written_as_a_layout_would_and_any_layout_loads_it(
    ranks: RankPool, model_folders: Any, tmp_path: Path, name: str, written_as: str, files: int, read_as: ParallelLayout
) -> None:
    source, _ = model_folders[name]
    flags = ("--to-megatron", "--check", "--layout", written_as)
    assert convert(ranks, source, tmp_path / "megatron", *flags)[0] == 0
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) == files
    ranks.run(loaded, read_as.world_size, read_as, tmp_path / "megatron", tmp_path / "hf")
    assert_same_bytes(tensors_of(source), tensors_of(tmp_path / "hf"))


def test_the_output_has_the_format_that_is_asked_for(ranks, model_folders, tmp_path) -> None:
    (source, _), flag, dtype = model_folders["deepseek_v3"], "bf16", torch.bfloat16
    assert convert(ranks, source, tmp_path / "mg", "--to-megatron", "--check", "--dtype", flag)[0] == 0
    ranks.run(write_checkpoint, 1, ParallelLayout(), source, tmp_path / "checkpoint", {})
    assert convert(ranks, tmp_path / "checkpoint", tmp_path / "hf", "--check", "--dtype", flag)[0] == 0
    assert convert(ranks, tmp_path / "mg", tmp_path / "again", "--check")[0] == 0
    for folder in ("hf", "again"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        for name, tensor in tensors_of(tmp_path / folder).items():
            expected = tensors_of(source)[name]
            assert torch.equal(tensor, expected.to(expected.dtype if name.endswith("_bias") else dtype)), name


def test_a_recover_checkpoint_is_its_actor_unless_another_engine_is_named(ranks, model_folders, tmp_path) -> None:
    source, _ = model_folders["qwen3"]
    for step in (8, 10):
        for engine, options in (("actor", {}), ("critic", {"is_critic": True})):
            target = tmp_path / "recover" / f"globalstep{step}" / engine
            ranks.run(write_checkpoint, 1, ParallelLayout(), source, target, options)
    (tmp_path / "recover" / "globalstep10" / "run.json").write_text("{}")
    (tmp_path / "recover" / "globalstep8" / "actor" / ".metadata").unlink()  # not the newest: never looked at
    for i, folder in enumerate(("recover", "recover/globalstep10", "recover/globalstep10/actor")):
        assert convert(ranks, tmp_path / folder, tmp_path / f"hf{i}", "--check")[0] == 0
        assert_same_bytes(tensors_of(source), tensors_of(tmp_path / f"hf{i}"))
    assert convert(ranks, tmp_path / "recover", tmp_path / "critic", "--engine", "critic")[0] == 0
    assert "score.weight" in tensors_of(tmp_path / "critic")
    status, _, err = convert(ranks, tmp_path / "recover", tmp_path / "no", "--engine", "reward")
    assert status == 2 and "actor, critic" in err


def test_a_damaged_recover_checkpoint_is_refused_by_the_name_of_the_file(ranks, model_folders, tmp_path) -> None:
    source, _ = model_folders["qwen3"]
    step = tmp_path / "recover" / "globalstep4"
    for engine in ("actor", "critic"):
        ranks.run(write_checkpoint, 1, ParallelLayout(), source, step / engine, {"is_critic": engine == "critic"})
    seal(step)
    assert convert(ranks, tmp_path / "recover", tmp_path / "hf")[0] == 0
    shard = next((step / "actor").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    for folder in ("recover", "recover/globalstep4", "recover/globalstep4/actor"):
        status, out, err = convert(ranks, tmp_path / folder, tmp_path / "no")
        assert (status, out) == (2, "") and f"{shard.name} is damaged: its checksum differs" in err
    assert not (tmp_path / "no").exists()
    assert convert(ranks, tmp_path / "recover", tmp_path / "critic", "--engine", "critic")[0] == 0, "it is whole"
    (step / "COMMITTED").unlink()
    status, _, err = convert(ranks, tmp_path / "recover", tmp_path / "no", "--engine", "critic")
    assert status == 2 and "COMMITTED is missing: it was never committed" in err


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_earlier_conversion_is_replaced_only_when_asked(ranks: RankPool, model_folders: Any, tmp_path: Path) -> None:
    source, _ = model_folders["qwen2"]
    flags = ("--to-megatron", "--overwrite")
    (tmp_path / "out").mkdir()  # empty: there is nothing to lose
    assert convert(ranks, source, tmp_path / "out", "--to-megatron")[0] == 0
    before = content_of(tmp_path / "out")
    assert convert(ranks, source, tmp_path / "out", "--to-megatron")[0] == 2
    assert convert(ranks, source, tmp_path / "out", *flags, "--layout", "d1m3p1")[0] == 2
    assert content_of(tmp_path / "out") == before
    assert convert(ranks, source, tmp_path / "out", *flags, "--layout", "d1m2p1")[0] == 0
    assert len(list((tmp_path / "out").glob("*.distcp"))) == 2
    for _ in range(2):
        assert convert(ranks, tmp_path / "out", tmp_path / "hf", "--overwrite")[0] == 0
    assert convert(ranks, source, tmp_path / "hf", *flags)[0] == 0, "of the other kind"
    assert {path.name for path in tmp_path.iterdir()} == {"out", "hf"}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("the source", ("must not be, hold or lie in",)),
        ("the source by another name", ("must not be, hold or lie in",)),
        ("above the source", ("must not be, hold or lie in",)),
        ("in the source", ("must not be, hold or lie in",)),
        ("beside the engine in its recover checkpoint", ("must not be, hold or lie in",)),
        ("somebody's file", ("--overwrite replaces only", "it holds mine", "name a new folder")),
        ("somebody's folder beside a model", ("--overwrite replaces only", "it holds data", "name a new folder")),
        ("a config alone", ("--overwrite replaces only", "no config.json next to the tensors")),
        ("an engine's checkpoint", ("--overwrite replaces only", "an engine's checkpoint")),
        ("the current folder", ("--output_path", "current folder", "name a folder inside it")),
        ("a mount point", ("--output_path", "mount point", "name a folder inside it")),
    ],
)
def test_overwriting_deletes_nothing_that_no_conversion_wrote(ranks, model_folders, tmp_path, what, words) -> None:
    source, flags = shutil.copytree(model_folders["qwen2"][0], tmp_path / "models" / "hf"), ["--to-megatron"]
    (tmp_path / "models" / "unrelated").write_text("kept")
    target = tmp_path / "out"
    if what == "the source":
        target = source
    elif what == "the source by another name":
        (tmp_path / "link").symlink_to(tmp_path / "models")
        target = tmp_path / "link" / "hf"
    elif what == "above the source":
        target = tmp_path / "models"
    elif what == "in the source":
        target = source / "out"
    elif what in ("an engine's checkpoint", "beside the engine in its recover checkpoint"):
        for engine in ("actor", "critic"):
            ranks.run(write_checkpoint, 1, ParallelLayout(), source, tmp_path / "recover/globalstep3" / engine, {})
        target = tmp_path / "recover" / "globalstep3" / "critic"
        if what != "an engine's checkpoint":
            source, flags = tmp_path / "recover", []
    elif what == "somebody's file":
        target.mkdir()
        (target / "mine").write_text("kept")
    elif what == "a config alone":
        target.mkdir()
        (target / "config.json").write_text("{}")
    else:
        shutil.copytree(source, target)
        if what == "somebody's folder beside a model":
            (target / "data").mkdir()
    before = content_of(tmp_path)
    arguments = ("--checkpoint_path", str(source), "--output_path", str(target), "--overwrite", *flags)
    if what in ("the current folder", "a mount point"):
        status, out, err = ranks.run(run_convert_at, 1, what, target, *arguments)[0]
    else:
        status, out, err = ranks.run(run_convert, 1, *arguments)[0]
    assert (status, out) == (2, "") and all(word in err for word in words), err
    assert content_of(tmp_path) == before
    assert not list(tmp_path.rglob(".*.*")), "nothing temporary is left"


def run_convert_at(rank: Rank, what: str, target: Path, *arguments: str) -> tuple[int, str, str]:
    """run_convert() where the target, an earlier conversion, is the current folder ('.') or a mount point."""
    with pytest.MonkeyPatch.context() as patch:
        if what == "the current folder":
            patch.chdir(target)
            arguments = tuple("." if argument == str(target) else argument for argument in arguments)
        else:
            patch.setattr(os.path, "ismount", lambda path: Path(path) == target)
        return run_convert(rank, *arguments)


def run_convert_damaged(rank: Rank, *arguments: str) -> tuple[int, str, str]:
    """run_convert() with a byte that gets lost on the way."""
    from mcore_adapter.checkpoint import streaming

    real = streaming.checkpoint_to_hf

    def checkpoint_to_hf(source: Path, target: Path, *others: Any) -> None:
        real(source, target, *others)
        file = target / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "checkpoint_to_hf", checkpoint_to_hf)
        return run_convert(rank, *arguments)


def test_an_output_that_differs_never_appears_and_the_old_one_stays(ranks: RankPool, model_folders, tmp_path) -> None:
    assert convert(ranks, model_folders["qwen2"][0], tmp_path / "megatron", "--to-megatron")[0] == 0
    arguments = ("--checkpoint_path", str(tmp_path / "megatron"), "--output_path", str(tmp_path / "hf"))
    status, out, err = ranks.run(run_convert_damaged, 1, *arguments, "--check")[0]
    assert (status, out) == (1, "") and "1 tensors differ after converting back, output deleted: " in err
    assert {path.name for path in tmp_path.iterdir()} == {"megatron"}
    assert ranks.run(run_convert, 1, *arguments)[0][0] == 0
    before = content_of(tmp_path / "hf")
    assert ranks.run(run_convert_damaged, 1, *arguments, "--check", "--overwrite")[0][0] == 1
    assert content_of(tmp_path / "hf") == before
    assert {path.name for path in tmp_path.iterdir()} == {"megatron", "hf"}


def run_convert_with_free(rank: Rank, free: dict[str, int], *arguments: str) -> tuple[int, str, str]:
    """run_convert() where folders have that much space, others none; nothing is added for what is beside tensors."""
    from tools import convert

    def disk_usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=free.get(str(path), 0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", disk_usage)
        patch.setattr(convert, "_METADATA_BYTES", 0)
        return run_convert(rank, *arguments)


@pytest.mark.parametrize("layout", ["d1m1p1", "d1m2p2"])
def test_the_space_that_is_needed_is_looked_for_where_it_is_written(ranks, model_folders, tmp_path, layout) -> None:
    hf = shutil.copytree(model_folders["qwen2"][0], tmp_path / "hf")
    (hf / "tokenizer.json").write_bytes(b" " * (3 << 20))
    for source, target, flags in (
        (hf, tmp_path / "megatron", ("--to-megatron", "--layout", layout)),
        (tmp_path / "megatron", tmp_path / "again", ()),
    ):
        assert convert(ranks, source, target, *flags)[0] == 0
        needed = sum(map(len, content_of(target).values()))
        arguments = ("--checkpoint_path", str(source), "--output_path", str(target), "--overwrite", *flags)
        status, _, err = ranks.run(run_convert_with_free, 1, {str(tmp_path): needed - 1}, *arguments)[0]
        assert status == 2 and f"{tmp_path} has 0.00 GiB free" in err
        assert ranks.run(run_convert_with_free, 1, {str(tmp_path): 2 * needed}, *arguments)[0][0] == 0


def test_everything_that_a_model_folder_needs_is_copied(ranks: RankPool, model_folders: Any, tmp_path: Path) -> None:
    hf = shutil.copytree(model_folders["qwen2"][0], tmp_path / "hf")
    texts = {"tokenizer_config.json": "{}", "chat_template.jinja": "{{ x }}", "generation_config.json": '{"top_k": 3}'}
    for name, text in texts.items():
        (hf / name).write_text(text)
    assert convert(ranks, hf, tmp_path / "megatron", "--to-megatron")[0] == 0
    assert convert(ranks, tmp_path / "megatron", tmp_path / "again")[0] == 0
    for name, text in texts.items():
        assert (tmp_path / "again" / name).read_text() == text


def test_a_critic_converts_with_its_value_head(ranks: RankPool, model_folders: Any, tmp_path: Path) -> None:
    layout = ParallelLayout(tp=2)
    options = {"is_critic": True, "dtype": torch.bfloat16}
    ranks.run(write_checkpoint, 2, layout, model_folders["qwen3"][0], tmp_path / "checkpoint", options)
    assert convert(ranks, tmp_path / "checkpoint", tmp_path / "hf", "--check")[0] == 0
    head = tensors_of(tmp_path / "hf")["score.weight"]
    assert head.shape == (1, 32) and head.dtype == torch.bfloat16 and head.abs().max() > 0
    assert convert(ranks, tmp_path / "hf", tmp_path / "back", "--to-megatron", "--check")[0] == 0


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no source", ("no such folder",)),
        ("hugging face without the flag", ("add --to-megatron",)),
        ("checkpoint with the flag", ("leave out --to-megatron",)),
        ("output exists", ("exists and is not empty",)),
        ("truncated safetensors", ("model.safetensors", "truncated")),
        ("mixed dtypes", ("F32", "BF16", "one dtype")),
        ("missing shard", ("model-2.safetensors", "no such file")),
        ("unknown architecture", ("model_type='gpt2'", "qwen2, qwen3")),
        ("shapes", ("[48, 32]", "config.json requires [50, 32]")),
        ("no space", ("GiB", "free")),
        ("layout that does not fit", ("num_attention_heads=4", "3")),
        ("checkpoint of another shape", ("config.json requires (2,",)),
        ("truncated checkpoint", ("cannot be read",)),
        ("checkpoint without a shard", (".distcp", "cannot be read")),
        ("checkpoint without .metadata", (".metadata",)),
        ("checkpoint with a truncated common.pt", ("common.pt",)),
        ("checkpoint with a damaged metadata.json", ("metadata.json", "cannot be read")),
    ],
)
def test_bad_input_is_one_error_and_nothing_is_written(ranks, model_folders, tmp_path, what, words) -> None:
    write_model("llama", tmp_path / "hf")
    source, target, flags = tmp_path / "hf", tmp_path / "out", ["--to-megatron"]
    if "checkpoint" in what:
        source, flags = tmp_path / "checkpoint", []
        ranks.run(write_checkpoint, 1, ParallelLayout(), tmp_path / "hf", source, {})
    file = tmp_path / "hf" / "model.safetensors"
    if what == "no source":
        source = tmp_path / "nowhere"
    elif what == "hugging face without the flag":
        flags = []
    elif what == "checkpoint with the flag":
        flags = ["--to-megatron"]
    elif what == "output exists":
        target.mkdir()
        (target / "mine").write_text("kept")
    elif what == "truncated safetensors":
        file.write_bytes(file.read_bytes()[:-10])
    elif what == "mixed dtypes":
        tensors = load_file(file)
        tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
        save_file(tensors, file)
    elif what == "missing shard":
        names = load_file(file)
        file.rename(file.with_name("model-1.safetensors"))
        weight_map = dict.fromkeys(names, "model-1.safetensors") | {"model.norm.weight": "model-2.safetensors"}
        (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    elif what in CONFIG_CHANGES:
        config = source / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **CONFIG_CHANGES[what]}))
    elif what == "layout that does not fit":
        flags.append("--layout=d1m3p1")
    elif what == "checkpoint without .metadata":
        (source / ".metadata").unlink()
    elif what == "checkpoint with a truncated common.pt":
        (source / "common.pt").write_bytes((source / "common.pt").read_bytes()[:100])
    elif what == "checkpoint with a damaged metadata.json":
        (source / "metadata.json").write_text("[]")
    else:
        shard = next(source.glob("*.distcp"))
        if what == "truncated checkpoint":
            shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 3])
        else:
            shard.unlink()
    before = {path.name for path in tmp_path.iterdir()}
    status, out, err = convert(ranks, source, target, *flags)
    assert status == 2 and out == "" and err.startswith("error: ")
    assert all(word in err for word in words), err
    assert "checkpoint with" not in what or err.count("\n") == 1, err
    assert {path.name for path in tmp_path.iterdir()} == before
    if what == "output exists":
        assert [path.name for path in target.iterdir()] == ["mine"]
