"""tools/convert.py: checkpoints of every layout and family to Hugging Face folders and back."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mcore_ranks import Rank, RankPool, build
from safetensors.torch import load_file, save_file
from test_weights import assert_same_bytes, tensors_of
from tiny_models import MODELS, write_model

from allocation import ParallelLayout

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = [ParallelLayout(), ParallelLayout(tp=2, pp=2), ParallelLayout(pp=2, vpp=2), ParallelLayout(dp=2)]


def write_checkpoint(rank: Rank, layout: ParallelLayout, source: Path, target: Path, options: dict[str, Any]) -> None:
    from mcore_adapter.checkpoint import save_checkpoint

    with rank.joined(layout) as (parallel, device):
        chunks = build(source, parallel, device, **options)
        save_checkpoint(target, chunks, None, parallel=parallel, tokenizer_from=source)


def run_convert(rank: Rank, *arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)"""
    from tools.convert import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


def convert(ranks: RankPool, source: Path, target: Path, *flags: str) -> tuple[int, str, str]:
    return ranks.run(run_convert, 1, "--checkpoint_path", str(source), "--output_path", str(target), *flags)[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_checkpoint_of_any_layout_becomes_the_model_that_it_holds(
    ranks: RankPool, model_folders: Any, tmp_path: Path, layout: ParallelLayout
) -> None:
    source, model = model_folders["qwen2_tied"]
    ranks.run(write_checkpoint, layout.world_size, layout, source, tmp_path / "checkpoint", {})
    status, out, err = convert(ranks, tmp_path / "checkpoint", tmp_path / "hf", "--check")
    assert (status, err) == (0, "") and "byte-equal" in out
    assert_same_bytes(tensors_of(source), tensors_of(tmp_path / "hf"))
    assert (tmp_path / "hf" / "generation_config.json").exists()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_there_and_back_is_byte_equal_for_every_family(
    ranks: RankPool, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    write_model(name, tmp_path / "hf", dtype=dtype)
    status, out, err = convert(ranks, tmp_path / "hf", tmp_path / "megatron", "--to-megatron", "--check")
    assert (status, err) == (0, "") and "byte-equal" in out
    assert convert(ranks, tmp_path / "megatron", tmp_path / "again", "--check")[0] == 0
    assert_same_bytes(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "again"))
    before, after = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("hf", "again"))
    assert after == before


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
        ("truncated checkpoint", ("cannot be read",)),
        ("checkpoint without a shard", (".distcp", "cannot be read")),
        ("checkpoint without .metadata", (".metadata",)),
        ("checkpoint with a truncated common.pt", ("common.pt",)),
    ],
)
def test_bad_input_is_one_error_and_nothing_is_written(
    ranks: RankPool, model_folders: Any, tmp_path: Path, what: str, words: tuple[str, ...]
) -> None:
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
    elif what == "checkpoint without .metadata":
        (source / ".metadata").unlink()
    elif what == "checkpoint with a truncated common.pt":
        (source / "common.pt").write_bytes((source / "common.pt").read_bytes()[:100])
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
    assert {path.name for path in tmp_path.iterdir()} == before
    if what == "output exists":
        assert [path.name for path in target.iterdir()] == ["mine"]


def test_the_command_line_runs(model_folders: Any, tmp_path: Path) -> None:
    source, _ = model_folders["qwen2"]
    command = [sys.executable, "-m", "tools.convert", "--checkpoint_path", source, "--output_path", tmp_path / "out"]
    done = subprocess.run([*command, "--to-megatron"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"wrote {tmp_path / 'out'}\n"), done.stderr
    assert done.stderr == ""
