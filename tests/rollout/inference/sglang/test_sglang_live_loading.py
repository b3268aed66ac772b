"""The loaders of the pinned SGLang hold weights as they were sent, push after push: the first push is loaded by the
model, the second one copied to the same places."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from core.weight_sync.buckets import quantize_bucket, wrong_formats
from helpers.sglang_environment import PYTHON, WHY_NOT, environment, replica
from model_specs.families import parse_config
from rollout.inference.sglang.checksums import ExpectedChecksums, ModelShape
from rollout.inference.sglang.server import server_flags

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(PYTHON is None, reason=WHY_NOT)]

SIZES: dict[str, Any] = dict(
    hidden_act="silu", hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=128, vocab_size=512, max_position_embeddings=512, rms_norm_eps=1e-6,
    rope_theta=1e4, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None, torch_dtype="bfloat16",
)  # fmt: skip
MOE: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, decoder_sparse_step=1, norm_topk_prob=True,
    tie_word_embeddings=False,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {**SIZES, "architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3": {**SIZES, "architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": {**SIZES, **MOE, "architectures": ["Qwen3MoeForCausalLM"]},
}


def weights(config: dict[str, Any], version: int) -> dict[str, torch.Tensor]:
    hidden, query, keys = 256, config["num_attention_heads"] * 128, config["num_key_value_heads"] * 128
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (512, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        sizes["lm_head.weight"] = (512, hidden)
    for layer in (f"model.layers.{i}." for i in range(2)):
        attention = f"{layer}self_attn."
        sizes |= {f"{attention}{part}_proj.weight": (n, hidden) for part, n in (("q", query), ("k", keys), ("v", keys))}
        sizes |= {f"{attention}o_proj.weight": (hidden, query), f"{layer}input_layernorm.weight": (hidden,)}
        sizes[f"{layer}post_attention_layernorm.weight"] = (hidden,)
        if config["model_type"] == "qwen2":
            sizes |= {f"{attention}{part}_proj.bias": (n,) for part, n in (("q", query), ("k", keys), ("v", keys))}
        else:
            sizes |= {f"{attention}{part}_norm.weight": (128,) for part in ("q", "k")}
        experts = [f"{layer}mlp.experts.{e}." for e in range(4)] if "num_experts" in config else [f"{layer}mlp."]
        width = 128 if "num_experts" in config else 512
        sizes |= {f"{mlp}{part}_proj.weight": (width, hidden) for mlp in experts for part in ("gate", "up")}
        sizes |= {f"{mlp}down_proj.weight": (hidden, width) for mlp in experts}
        sizes |= {f"{layer}mlp.gate.weight": (4, hidden)} if "num_experts" in config else {}
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(size, generator=generator).to(torch.bfloat16) for name, size in sizes.items()}


@pytest.mark.parametrize("weight_format", ["auto", "fp8_block"])
@pytest.mark.parametrize("family", MODELS)
def test_a_family_holds_values_and_factors_as_they_were_sent(family, weight_format, tmp_path) -> None:
    config = {**MODELS[family], "model_type": family}
    if family == "qwen2":
        del config["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = parse_config(config)
    settings = replica(
        name="g", model_path=str(tmp_path), log_file=tmp_path / "log", gpus=(0,), weight_format=weight_format
    )
    override = server_flags(settings, model, port=1, nccl_port=2).get("json_model_override_args", "{}")
    pushes = [weights(config, version) for version in (1, 2)]
    if weight_format == "fp8_block":
        pushes = [quantize_bucket(push) for push in pushes]
    files = [tmp_path / f"{version}.safetensors" for version in (1, 2)]
    for push, file in zip(pushes, files, strict=True):
        save_file(push, file)
    script = Path(__file__).parents[3] / "helpers/sglang_load.py"
    words = [str(PYTHON), "-P", str(script), str(tmp_path), override, *map(str, files)]
    done = subprocess.run(words, env=os.environ | environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    loads = json.loads(done.stdout.splitlines()[-1])
    assert [loaded for *_, loaded in loads] == [2, 0], "the model itself loads each bucket once"
    for push, (checksums, formats, _) in zip(pushes, loads, strict=True):
        expected = ExpectedChecksums(ModelShape.from_config(model), tp=1)
        expected.add(push)
        assert expected.mismatches([checksums]) == []
        if weight_format == "fp8_block":
            assert list(wrong_formats(expected.formats([formats]))) == []
