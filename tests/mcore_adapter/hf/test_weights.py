"""Weights in and out: byte-equal round trips, folders that transformers loads, errors that name the file."""

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from allocation import ParallelLayout
from helpers.mcore_ranks import LAYOUTS, Rank, RankPool, build, cases
from helpers.saved_models import assert_same_bytes, tensors_of
from helpers.tiny_models import MODELS, write_model
from mcore_adapter.hf.safetensors_folder import INDEX_FILE, SINGLE_FILE, ShardWriter, TensorSpec

# What runs on the ranks


def round_trip(
    rank: Rank, layout: ParallelLayout, source: Path, target: Path, options: dict[str, Any]
) -> tuple[int, int]:
    """Load and save; return what loading took from the files, and the size of what this rank holds, in elements."""
    from mcore_adapter.hf.safetensors_folder import SafetensorsFolder
    from mcore_adapter.hf.weights import save_hf
    from mcore_adapter.models.gpt import named_conversions

    read, sizes = SafetensorsFolder.read, []

    def counted(*args: Any) -> Tensor:
        part = read(*args)
        sizes.append(part.numel())
        return part

    with rank.joined(layout) as (parallel, device), pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsFolder, "read", counted)
        chunks = build(source, parallel, device, **options)
        save_hf(chunks, target, parallel=parallel, tokenizer_from=source)
        return sum(sizes), sum(tensor.numel() for tensor, _ in named_conversions(chunks))


def from_scratch(rank: Rank, layout: ParallelLayout, source: Path, target: Path, is_critic: bool) -> None:
    from mcore_adapter.hf.weights import init_from_scratch, save_hf
    from mcore_adapter.models.gpt import build_model
    from model_specs.families import read_config

    with rank.joined(layout) as (parallel, device):
        chunks = build_model(
            read_config(source), parallel=parallel, device=device, dtype=torch.float32, is_critic=is_critic
        )
        init_from_scratch(chunks, parallel=parallel, seed=5)
        save_hf(chunks, target, parallel=parallel)


def bucket_sizes(rank: Rank, layout: ParallelLayout, source: Path, bucket_bytes: int) -> list[dict[str, int]]:
    from mcore_adapter.hf.weights import iter_hf_weights

    with rank.joined(layout) as (parallel, device):
        chunks = build(source, parallel, device)
        buckets = iter_hf_weights(chunks, parallel=parallel, bucket_bytes=bucket_bytes)
        return [{name: t.numel() * t.element_size() for name, t in bucket.items()} for bucket in buckets]


def load_error(rank: Rank, source: Path, is_critic: bool) -> str:
    from mcore_adapter.hf.safetensors_folder import WeightsError

    with rank.joined(ParallelLayout()) as (parallel, device):
        try:
            build(source, parallel, device, is_critic=is_critic)
        except WeightsError as error:
            return str(error)
    return "loaded"


def save_error(rank: Rank, layout: ParallelLayout, source: Path, target: Path, disk_bytes: int) -> str:
    """Save with files limited to disk_bytes: writing more fails as on a full disk."""
    from mcore_adapter.hf.safetensors_folder import WeightsError
    from mcore_adapter.hf.weights import save_hf

    with rank.joined(layout) as (parallel, device):
        chunks = build(source, parallel, device)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (disk_bytes, hard))
        try:
            save_hf(chunks, target, parallel=parallel)
        except WeightsError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "saved"


# Round trips


@cases(MODELS, LAYOUTS, others=())
def test_hugging_face_to_megatron_and_back_is_byte_equal(ranks, model_folders, tmp_path, name, layout) -> None:
    source, _ = model_folders[name]
    ranks.run(round_trip, layout.world_size, layout, source, tmp_path / "out", {})
    assert_same_bytes(tensors_of(source), tensors_of(tmp_path / "out"))


def test_bfloat16_files_survive_float32_training_weights_and_back(ranks: RankPool, tmp_path: Path) -> None:
    write_model("qwen2_tied", tmp_path / "source", dtype=torch.bfloat16)
    layout = ParallelLayout(tp=2)
    ranks.run(round_trip, 2, layout, tmp_path / "source", tmp_path / "fp32", {"dtype": torch.float32})
    ranks.run(round_trip, 2, layout, tmp_path / "fp32", tmp_path / "bf16", {"dtype": torch.bfloat16})
    assert_same_bytes(tensors_of(tmp_path / "source"), tensors_of(tmp_path / "bf16"))
    assert json.loads((tmp_path / "fp32" / "config.json").read_text())["dtype"] == "float32"
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_folder_of_many_shards_loads_like_one_file(ranks: RankPool, model_folders: Any, tmp_path: Path) -> None:
    write_model("qwen3", tmp_path / "source", max_shard_size="20KB")
    assert (tmp_path / "source" / INDEX_FILE).exists()
    ranks.run(round_trip, 2, ParallelLayout(pp=2), tmp_path / "source", tmp_path / "out", {})
    assert_same_bytes(tensors_of(tmp_path / "source"), tensors_of(tmp_path / "out"))


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_reads_what_it_holds_and_transformers_loads_what_was_saved(ranks, model_folders, tmp_path, name) -> None:
    import transformers

    original, model = model_folders[name]
    source = shutil.copytree(original, tmp_path / "source")
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "test"}')
    counts = ranks.run(round_trip, 4, LAYOUTS["tp2 pp2"], source, tmp_path / "out", {})
    assert all(read == held for read, held in counts), counts
    assert max(read for read, _ in counts) < sum(tensor.numel() for tensor in tensors_of(source).values())
    assert_same_bytes(tensors_of(source), tensors_of(tmp_path / "out"))
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(loaded) is type(model) and not any(report.values()), report
    tokens = torch.arange(20)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"tokenizer_class": "test"}'
    assert (tmp_path / "out" / "generation_config.json").exists()


# Buckets


@pytest.mark.parametrize("layout", [LAYOUTS["cp2"], LAYOUTS["tp2 pp2"]], ids=str)
def test_buckets_stay_below_their_size_and_reach_rank_0_only(ranks, model_folders, layout) -> None:
    source, _ = model_folders["llama"]
    answers = ranks.run(bucket_sizes, layout.world_size, layout, source, 16_000)
    assert len(answers[0]) > 5 and all(sum(bucket.values()) <= 16_000 for bucket in answers[0])
    names = [name for bucket in answers[0] for name in bucket]
    assert sorted(names) == sorted(tensors_of(source))
    for others in answers[1:]:
        assert others == [{}] * len(answers[0])


# From scratch

CUTS = {name: LAYOUTS[name] for name in ("one process", "tp2 pp2", "pp2 vpp2")}


@pytest.mark.parametrize("is_critic", [False, True])
def test_a_fresh_model_is_the_same_in_every_layout(ranks: RankPool, model_folders, tmp_path, is_critic: bool) -> None:
    source, _ = model_folders["qwen2_tied"]
    for name, layout in CUTS.items():
        ranks.run(from_scratch, layout.world_size, layout, source, tmp_path / name, is_critic)
    expected = tensors_of(tmp_path / "one process")
    for name in CUTS:
        assert_same_bytes(expected, tensors_of(tmp_path / name))
    for name, tensor in expected.items():
        if name.endswith("norm.weight"):
            assert (tensor == 1).all(), name
        elif name.endswith("bias"):
            assert (tensor == 0).all(), name
        else:
            std = 1 / 33 if name == "score.weight" else 0.08
            assert abs(tensor.std() / std - 1) < (0.5 if tensor.numel() < 100 else 0.1), name
    assert len({tensor.flatten()[0].item() for name, tensor in expected.items() if "proj.weight" in name}) == 4 * 7


def test_a_critic_made_from_a_language_model_is_the_same_in_every_layout_and_loads_again(
    ranks: RankPool, model_folders: Any, tmp_path: Path
) -> None:
    import transformers

    source, model = model_folders["qwen2_tied"]
    for name, layout in CUTS.items():
        ranks.run(round_trip, layout.world_size, layout, source, tmp_path / name, {"is_critic": True})
    expected = tensors_of(tmp_path / "one process")
    for name in CUTS:
        assert_same_bytes(expected, tensors_of(tmp_path / name))
    head = expected.pop("score.weight")
    assert head.shape == (1, 32) and 0 < head.abs().max() < 0.2
    assert_same_bytes(expected, tensors_of(source))

    out = tmp_path / "one process"
    loaded, report = transformers.AutoModelForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()) and torch.equal(loaded.score.weight, head)
    ranks.run(round_trip, 2, ParallelLayout(tp=2), out, tmp_path / "again", {"is_critic": True})
    assert_same_bytes(tensors_of(out), tensors_of(tmp_path / "again"))


# Bad input


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS = {
    "overlap": {"one": ONE, "other": ONE | {"data_offsets": [4, 12]}},
    "hole": {"one": ONE | {"data_offsets": [4, 12]}},
    "no texts": {"one": ONE, "other": ONE | {"shape": [1], "data_offsets": [8, 12]}, "__metadata__": {"format": 1}},
}


def broken(folder: Path, what: str) -> Path:
    """Break a folder of two tensors' worth of shards; returns the file that the error must name."""
    single = folder / SINGLE_FILE
    if what == "truncated":
        single.write_bytes(single.read_bytes()[:-100])
    elif what == "truncated header":
        single.write_bytes(single.read_bytes()[:50])
    elif what == "not safetensors":
        single.write_text("<html>")
    elif what in HEADERS:
        header = json.dumps(HEADERS[what]).encode()
        single.write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    elif what == "absent":
        single.unlink()
        return folder
    elif what == "missing shard":
        tensors = load_file(single)
        single.unlink()
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}))
        return folder / "model-1.safetensors"
    elif what == "broken index":
        (folder / INDEX_FILE).write_text('{"weight_map": ')
        return folder / INDEX_FILE
    else:
        tensors = load_file(single)
        name = "model.layers.2.mlp.up_proj.weight"
        if what == "missing tensor":
            del tensors[name]
        elif what == "wrong shape":
            tensors[name] = tensors[name][:-1].contiguous()
        elif what == "unknown tensor":
            tensors["model.layers.2.mlp.up_proj.lora_A"] = torch.zeros(2)
        save_file(tensors, single)
        return folder if what == "missing tensor" else single
    return single


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("truncated", ["truncated"]),
        ("truncated header", ["truncated"]),
        ("not safetensors", ["not a safetensors file"]),
        ("overlap", ["header cannot be read", "overlap"]),
        ("hole", ["header cannot be read", "leave bytes out"]),
        ("no texts", ["header cannot be read", "__metadata__"]),
        ("absent", [SINGLE_FILE, INDEX_FILE]),
        ("missing shard", ["no such file"]),
        ("broken index", ["not an index"]),
        ("missing tensor", ["model.layers.2.mlp.up_proj.weight"]),
        ("wrong shape", ["model.layers.2.mlp.up_proj.weight", "[47, 32]", "[48, 32]"]),
        ("unknown tensor", ["model.layers.2.mlp.up_proj.lora_A"]),
    ],
)
def test_a_bad_checkpoint_is_an_error_that_names_the_file(ranks, tmp_path, what, words) -> None:
    write_model("qwen2", tmp_path)
    named = broken(tmp_path, what)
    message = ranks.run(load_error, 1, tmp_path, False)[0]
    assert str(named) in message and all(word in message for word in words), message


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(tp=2, pp=2)], ids=str)
def test_a_full_disk_fails_on_every_rank_and_keeps_the_old_folder(ranks, model_folders, tmp_path, layout) -> None:
    source, _ = model_folders["qwen3"]
    target = tmp_path / "out"
    ranks.run(round_trip, 1, ParallelLayout(), source, target, {})
    for message in ranks.run(save_error, layout.world_size, layout, source, target, 20_000):
        assert str(target) in message and "could not be written" in message
    assert_same_bytes(tensors_of(source), tensors_of(target))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_shards_are_cut_by_size_and_indexed(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(7)}
    specs = dict.fromkeys(tensors, TensorSpec(torch.float32, (10,)))
    writer = ShardWriter(tmp_path, specs, max_shard_bytes=100)
    for name, tensor in reversed(tensors.items()):
        writer.add(name, tensor)
    writer.finish()
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == 280
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])
