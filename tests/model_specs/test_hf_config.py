"""Reading a model's shape from config.json."""

import json
from pathlib import Path

import pytest

from helpers.hf_configs import DEEPSEEK_V2, DEEPSEEK_V3, QWEN2, QWEN3_MOE
from model_specs.config import YarnRopeScaling
from model_specs.families import parse_config, read_config
from model_specs.untrusted import ModelConfigError

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)


def test_what_a_family_fixes_without_saying_so_is_known() -> None:
    qwen2 = parse_config(QWEN2)
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim, qwen2.tied) == (True, False, 8, True)
    qwen3 = parse_config({**QWEN2, "model_type": "qwen3", "tie_word_embeddings": False})
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim, qwen3.tied) == (False, True, 128, False)
    llama = parse_config({**QWEN2, "model_type": "llama", "num_key_value_heads": None})
    assert (llama.qkv_bias, llama.qk_norm, llama.num_kv_heads) == (False, False, 4)


def test_experts_and_latent_attention_are_read() -> None:
    qwen = parse_config(
        {**QWEN2, **QWEN3_MOE, "decoder_sparse_step": 2, "num_hidden_layers": 5, "mlp_only_layers": [3]}
    )
    assert qwen.moe is not None and qwen.moe.sparse_layers == (False, True, False, False, False)
    assert (qwen.qk_norm, qwen.moe.score_function, qwen.moe.normalize) == (True, "softmax", True)
    v2 = parse_config({**QWEN2, **DEEPSEEK_V2})
    assert v2.moe is not None and v2.mla is not None
    assert (v2.moe.sparse_layers, v2.moe.shared_intermediate_size) == ((False, True), 32)
    assert (v2.mla.q_lora_rank, v2.mla.qk_head_dim, v2.moe.correction_bias) == (None, 12, False)
    v3 = parse_config({**QWEN2, **DEEPSEEK_V3})
    assert v3.moe is not None and v3.mla is not None
    assert (v3.moe.score_function, v3.moe.group_score, v3.moe.scaling, v3.moe.correction_bias) == (
        "sigmoid", "top2", 2.5, True,
    )  # fmt: skip


def test_a_fused_sandwiched_partly_rotated_decoder_is_read() -> None:
    glm4 = parse_config({**QWEN2, "model_type": "glm4", "head_dim": 16})
    assert (glm4.rotary_dim, glm4.rope_interleaved, glm4.post_norms, glm4.fused_gate_up) == (8, True, True, True)
    assert (glm4.qkv_bias, glm4.qk_norm) == (True, False)
    assert not parse_config({**QWEN2, "model_type": "glm4", "attention_bias": False}).qkv_bias
    llama = parse_config({**QWEN2, "model_type": "llama"})
    assert (llama.rotary_dim, llama.rope_interleaved, llama.post_norms) == (8, False, False)


@pytest.mark.parametrize(
    ("given", "mscale", "all_dim"),
    [({"mscale": 0.7, "mscale_all_dim": 0.5}, 0.7, 0.5), ({"mscale": 1.0}, 1.0, 0.0), ({}, 1.0, 0.0)],
)
def test_yarn_scales_cosines_by_mscale_only_beside_mscale_all_dim(given, mscale, all_dim) -> None:
    rope = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, **given}
    assert parse_config({**QWEN2, **DEEPSEEK_V2, "rope_scaling": rope}).rope_scaling == YarnRopeScaling(
        factor=40.0, beta_fast=32.0, beta_slow=1.0, mscale=mscale, mscale_all_dim=all_dim,
        original_max_position_embeddings=64,
    )  # fmt: skip


def test_what_a_file_leaves_out_has_the_default_of_transformers() -> None:
    untied = {key: value for key, value in QWEN2.items() if key != "tie_word_embeddings"}
    assert not parse_config(untied).tied
    v3 = parse_config({**QWEN2, **DEEPSEEK_V3}).moe
    assert v3 is not None and v3.normalize
    assert parse_config({**QWEN2, "dtype": "bfloat16"}).dtype == "bfloat16"
    assert parse_config({**QWEN2, "torch_dtype": "float16"}).dtype == "float16"
    assert parse_config(QWEN2).dtype is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, ("model_type='gpt2'", "deepseek_v2, deepseek_v3, glm4, llama, mistral, qwen2, qwen3")),
        ({"model_type": None}, ("model_type=None",)),
        ({"hidden_size": 0}, ("hidden_size=0", "positive")),
        ({"vocab_size": "100"}, ("vocab_size='100'", "integer")),
        ({"num_key_value_heads": 0}, ("num_key_value_heads=0", "positive")),
        ({"num_key_value_heads": "2"}, ("num_key_value_heads='2'", "integer")),
        ({"head_dim": "8"}, ("head_dim='8'", "integer")),
        ({"rms_norm_eps": "small"}, ("rms_norm_eps='small'", "number")),
        ({"model_type": ["qwen2"]}, ("model_type=['qwen2']",)),
        ({"num_key_value_heads": 3}, ("num_key_value_heads=3", "num_attention_heads=4")),
        ({"hidden_act": "gelu"}, ("hidden_act='gelu'", "silu")),
        ({"model_type": "mistral"}, ("sliding_window=64", "max_position_embeddings=128", "64")),
        ({**QWEN3_MOE, "num_experts": None}, ("num_experts=None",)),
        ({**QWEN3_MOE, "num_experts_per_tok": 5}, ("num_experts_per_tok=5", "num_experts=4")),
        ({**DEEPSEEK_V2, "norm_topk_prob": True}, ("norm_topk_prob=True",)),
        ({**DEEPSEEK_V2, "topk_method": "best"}, ("topk_method='best'", "greedy")),
        ({**DEEPSEEK_V3, "scoring_func": "softmax"}, ("scoring_func='softmax'", "sigmoid")),
        ({**DEEPSEEK_V3, "n_group": 3}, ("n_group=3", "4 experts")),
        ({**DEEPSEEK_V3, "num_experts_per_tok": 3}, ("topk_group=1", "num_experts_per_tok=3")),
        ({**DEEPSEEK_V3, "rms_norm_eps": 1e-5}, ("rms_norm_eps=1e-05",)),
        ({**DEEPSEEK_V3, "kv_lora_rank": None}, ("kv_lora_rank=None",)),
        ({"use_sliding_window": True}, ("use_sliding_window",)),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ("sliding",)),
        ({"model_type": "llama", "attention_bias": True}, ("attention_bias=True",)),
        ({"model_type": "llama", "mlp_bias": True}, ("mlp_bias=True",)),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ("rope_type='yarn'", "llama3")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor=0.5", "1.0")),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ("partial_rotary_factor=0.5", "1.0")),
        ({"model_type": "glm4", "partial_rotary_factor": 1.0}, ("partial_rotary_factor=1.0", "0.5")),
        ({"model_type": "gemma3_text"}, ("model_type='gemma3_text'", "glm4")),
        ({"rope_scaling": "yarn"}, ("rope_scaling='yarn'", "object")),
        ({"rope_scaling": {**LLAMA3, "factor": "8"}, "original_max_position_embeddings": 64}, ("factor='8'", "number")),
        ({"rope_theta": "1e6"}, ("rope_theta='1e6'", "number")),
        ({"rope_scaling": {**LLAMA3}, "original_max_position_embeddings": 0}, ("original_max_position_embeddings=0",)),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers=1000000000", "1000")),
        ({**QWEN3_MOE, "num_experts": 10**9}, ("num_experts=1000000000", "4096")),
        ({**QWEN3_MOE, "mlp_only_layers": "1"}, ("mlp_only_layers='1'", "list")),
        ({**QWEN3_MOE, "num_local_experts": 8}, ("num_experts=4", "num_local_experts=8")),
        ({"hidden_size": True}, ("hidden_size=True", "integer")),
        ({"architectures": 5, "head_dim": 7}, ("head_dim=7", "even")),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_with_key_and_value(change, words) -> None:
    with pytest.raises(ModelConfigError) as error:
        parse_config({**QWEN2, **change})
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    "content", [None, "{", "[]", json.dumps({**QWEN2, "model_type": "t5"})], ids=["absent", "broken", "a list", "t5"]
)
def test_errors_name_the_file(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelConfigError, match=str(tmp_path / "config.json")):
        read_config(tmp_path)
