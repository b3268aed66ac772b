"""Folders as people publish them: read as transformers reads them, to equal logits, or refused with the key."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from allocation import ParallelLayout
from helpers.mcore_ranks import Rank, RankPool, build
from helpers.tiny_models import SHAPE

TOKENS = torch.randint(0, 96, (200,), generator=torch.Generator().manual_seed(5))
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONTEXT = {"original_max_position_embeddings": 64}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
BOTH = {"mscale": 0.7, "mscale_all_dim": 0.5}
NEW = {"rope_type": "default", "rope_theta": 5e5}
DEEPSEEK = dict(
    moe_intermediate_size=24, num_experts_per_tok=2, num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=8,
    qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=8, first_k_dense_replace=1, n_shared_experts=2,
    q_lora_rank=None, initializer_range=0.15,
)  # fmt: skip
ABSENT = object()
EQUAL = ""

# (family, what the config.json of its folder has otherwise, EQUAL or what the refusal names)
CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "theta, old": ("Llama", {"rope_parameters": ABSENT, "rope_theta": 5e5}, EQUAL),
    "theta, new": ("Llama", {"rope_parameters": NEW}, EQUAL),
    "theta, both": ("Llama", {"rope_parameters": NEW, "rope_theta": 1e6}, EQUAL),
    "no theta": ("Qwen2", {"rope_parameters": ABSENT}, EQUAL),
    "null theta": ("Qwen2", {"rope_parameters": {"rope_theta": None}}, "rope_theta=None"),
    "llama3, old": ("Llama", {"rope_parameters": ABSENT, "rope_theta": 5e5, "rope_scaling": LLAMA3 | CONTEXT}, EQUAL),
    "llama3, new": ("Llama", {"rope_parameters": LLAMA3 | CONTEXT | {"rope_theta": 5e5}}, EQUAL),
    "llama3 beside new": ("Llama", {"rope_parameters": NEW, "rope_scaling": LLAMA3 | CONTEXT}, EQUAL),
    "empty beside new": ("Llama", {"rope_parameters": LLAMA3 | CONTEXT, "rope_scaling": {}}, EQUAL),
    "default beside llama3": (
        "Llama", {"rope_parameters": LLAMA3 | CONTEXT, "rope_scaling": {"type": "default"}}, EQUAL,
    ),
    "llama3, no context": ("Llama", {"rope_parameters": LLAMA3}, EQUAL),
    "llama3, other context on top": (
        "Llama", {"rope_parameters": LLAMA3 | CONTEXT, "original_max_position_embeddings": 32}, EQUAL,
    ),
    "llama3, half": ("Llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0} | CONTEXT}, "low_freq_factor"),
    "one rope for each kind": ("Qwen3", {"rope_parameters": {"full_attention": NEW}}, "full_attention"),
    "linear": ("Llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
    "longrope": (
        "Llama", {"rope_scaling": {"type": "longrope", "short_factor": [1] * 4, "long_factor": [2] * 4}}, "'longrope'",
    ),
    "yarn of a dense model": ("Qwen2", {"rope_scaling": YARN}, "rope_type='yarn'"),
    "yarn": ("DeepseekV2", {"rope_scaling": YARN}, EQUAL),
    "yarn, both mscales": ("DeepseekV2", {"rope_scaling": YARN | BOTH}, EQUAL),
    "yarn, mscale of 1": ("DeepseekV2", {"rope_scaling": YARN | {"mscale": 1.0}}, EQUAL),
    "yarn, mscale alone": ("DeepseekV2", {"rope_scaling": YARN | {"mscale": 0.7}}, "mscale=0.7"),
    "yarn, mscale_all_dim alone": ("DeepseekV2", {"rope_scaling": YARN | {"mscale_all_dim": 0.7}}, "mscale_all_dim"),
    "yarn, attention_factor": ("DeepseekV2", {"rope_scaling": YARN | {"attention_factor": 1.0}}, "attention_factor=1"),
    "yarn, truncate": ("DeepseekV2", {"rope_scaling": YARN | {"truncate": None}}, "truncate=None"),
    "yarn, no factor": ("DeepseekV2", {"rope_scaling": YARN | {"factor": None}}, "factor"),
    "latent, linear": ("DeepseekV2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
    "part of a head, old": ("Glm4", {"rope_parameters": ABSENT, "partial_rotary_factor": 0.5}, EQUAL),
    "another part of a head": ("Glm4", {"rope_parameters": NEW | {"partial_rotary_factor": 0.25}}, "partial_rotary"),
    "part of Llama's head": ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "null head_dim": ("Llama", {"head_dim": None}, EQUAL),
    "no head_dim": ("Mistral", {"head_dim": ABSENT, "sliding_window": None}, EQUAL),
    "latent head_dim": ("DeepseekV3", {"head_dim": 4}, "head_dim=4"),
    "no window": ("Mistral", {"sliding_window": None}, EQUAL),
    "window of the context": ("Mistral", {"sliding_window": 512}, EQUAL),
    "window": ("Mistral", {"sliding_window": 64}, "sliding_window=64"),
    "default window": ("Mistral", {"sliding_window": ABSENT}, EQUAL),
    "default window, long context": (
        "Mistral", {"sliding_window": ABSENT, "max_position_embeddings": 8192}, "sliding_window=4096",
    ),
    "unused window": ("Qwen2", {"sliding_window": 8, "use_sliding_window": False, "layer_types": ABSENT}, EQUAL),
    "used window": ("Qwen2", {"sliding_window": 8, "use_sliding_window": True}, "use_sliding_window=True"),
    "window of some layers": (
        "Qwen3", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "layer_types",
    ),
    "Llama ignores windows": ("Llama", {"sliding_window": 8}, EQUAL),
    "key/value heads left out": ("Qwen3", {"num_key_value_heads": ABSENT}, "num_key_value_heads=32"),
    "null key/value heads": ("LlamaMHA", {"num_key_value_heads": None}, EQUAL),
    "groups left out": ("DeepseekV3", {"n_group": ABSENT}, "n_group=8"),
    "dense layers left out": ("DeepseekV3", {"first_k_dense_replace": ABSENT}, "model.layers.1.mlp.gate_proj.weight"),
    "rank left out": ("DeepseekV2", {"q_lora_rank": ABSENT}, "q_a_proj.weight is missing"),
    "quantized": ("Qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "tied by a text": ("Qwen2", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false'"),
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "LlamaMHA": ("Llama", {"num_key_value_heads": 4}),
    "Mistral": ("Mistral", {}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {"head_dim": 16}),
    "Glm4": ("Glm4", {"head_dim": 16, "pad_token_id": None}),
    "DeepseekV2": ("DeepseekV2", DEEPSEEK),
    "DeepseekV3": ("DeepseekV3", DEEPSEEK | {"n_group": 1, "topk_group": 1}),
}


def publish(folder: Path, family: str, changes: Mapping[str, Any] = {}, *, seed: int = 0, **shape: Any) -> Path:
    """Write a random model and change its config.json."""
    name, settings = SHAPES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **settings, **shape})
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text()) | dict(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ABSENT}))
    return folder


def logits_of_rank(rank: Rank, folder: Path) -> Tensor | str:
    """On a rank: the logits of TOKENS, or why the folder is refused."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from mcore_adapter.models.gpt import lm_head_weight
    from model_specs.model_folder import ModelFolderError, read_model_folder

    try:
        read_model_folder(str(folder), weights=True, tokenizer=False, value_head=False)
    except ModelFolderError as error:
        return str(error)
    with rank.joined(ParallelLayout()) as (parallel, device), torch.no_grad():
        (chunk,) = build(folder, parallel, device)
        bounds, length = torch.tensor([0, len(TOKENS)], dtype=torch.int32), len(TOKENS)
        packing = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=length, max_seqlen_kv=length
        )
        hidden = chunk(TOKENS[None], torch.arange(length)[None], None, packed_seq_params=packing)[0]
        return hidden @ lm_head_weight(chunk).T


def check(ranks: RankPool, folder: Path, refused_for: str = EQUAL) -> None:
    (ours,) = ranks.run(logits_of_rank, 1, folder)
    if refused_for:
        assert isinstance(ours, str) and refused_for in ours, ours
        return
    assert isinstance(ours, Tensor), ours
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        torch.testing.assert_close(ours, model(TOKENS[None]).logits[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_is_read_as_transformers_reads_it_or_refused_with_the_key(ranks, tmp_path, case) -> None:
    family, changes, refused_for = CONFIGS[case]
    check(ranks, publish(tmp_path, family, changes), refused_for)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_odd_numbers_of_dimensions_are_built_or_refused(ranks: RankPool, tmp_path: Path, family: str) -> None:
    check(ranks, publish(tmp_path / "even", family, head_dim=22))
    check(ranks, publish(tmp_path / "odd", family, {"head_dim": 9}, head_dim=10), "head_dim=9")


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone().contiguous() for name, tensor in change(load_file(file)).items()}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("tied", [True, False])
def test_an_output_layer_of_its_own_is_kept_or_refused(ranks: RankPool, tmp_path, tied: bool, scale: float) -> None:
    publish(tmp_path, "Qwen2", tie_word_embeddings=tied)
    rewrite(tmp_path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] * scale})
    check(ranks, tmp_path, "tie_word_embeddings" if tied and scale != 1.0 else EQUAL)


def test_an_untied_model_without_an_output_layer_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    publish(tmp_path, "Qwen2", {"tie_word_embeddings": False}, tie_word_embeddings=True)
    check(ranks, tmp_path, "lm_head.weight is missing")


@pytest.mark.parametrize(
    ("state", "refused_for"),
    [
        ("sharded", EQUAL),
        ("index of the single file", EQUAL),
        ("old index and shards beside a new single file", "model.safetensors.index.json"),
        ("old index beside a new single file", "model.safetensors.index.json"),
        ("cache of the hub", EQUAL),
    ],
)
def test_the_files_that_count_are_those_of_transformers(ranks, tmp_path, state, refused_for) -> None:
    folder = publish(tmp_path / "model", "Llama", seed=1)
    single, shard = folder / "model.safetensors", folder / "model-00001-of-00001.safetensors"
    listed = single.name if state == "index of the single file" else shard.name
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(single), listed)}
    if state == "cache of the hub":
        os.renames(single, tmp_path / "blobs" / "abc")
        single.symlink_to("../blobs/abc")
    else:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if state == "sharded" or "shards" in state:
        single.rename(shard)
    if "new" in state:
        publish(tmp_path / "new", "Llama", seed=2)
        (tmp_path / "new" / "model.safetensors").rename(single)
    check(ranks, folder, refused_for)
