"""Which tensors the FP8 format quantizes, and which models servers can hold in it."""

from typing import Any

import pytest

from model_specs.families import parse_config
from model_specs.weight_files import is_quantized, serving_problems

QWEN2 = {
    "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 2, "vocab_size": 512,
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MOE = {
    "model_type": "qwen3_moe", "head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 768, "intermediate_size": 6000, "decoder_sparse_step": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "quantized"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.11.mlp.down_proj.weight", True),
        ("model.layers.3.mlp.experts.7.gate_proj.weight", True),
        ("model.layers.0.self_attn.q_proj.bias", False),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", False),
        ("model.layers.0.self_attn.q_norm.weight", False),
        ("model.layers.3.mlp.gate.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_weights_of_linear_layers_are_quantized_and_nothing_else(name: str, quantized: bool) -> None:
    assert is_quantized(name) is quantized


@pytest.mark.parametrize(
    ("changes", "tp", "problems"),
    [
        ({}, 1, []),
        ({}, 2, []),
        ({}, 4, ["intermediate_size / 4 is 2240"]),
        ({"hidden_size": 1500, "head_dim": 128}, 1, ["hidden_size is 1500"]),
        ({"num_key_value_heads": 1, "head_dim": 64, "num_attention_heads": 24}, 1, ["num_key_value_heads"]),
        (MOE, 2, []),
        (MOE, 4, ["moe_intermediate_size / 4 is 192"]),
        (MOE | {"mlp_only_layers": [0]}, 1, ["intermediate_size / 1 is 6000"]),
        ({"model_type": "llama"}, 1, ["fp8_block is for models of type qwen2, qwen3, qwen3_moe, got llama"]),
    ],
)
def test_a_size_that_blocks_do_not_divide_is_named(changes: dict[str, Any], tp: int, problems: list[str]) -> None:
    found = list(serving_problems(parse_config(QWEN2 | changes), tp))
    assert len(found) == len(problems), found
    assert all(part in text for part, text in zip(problems, found, strict=True)), found
