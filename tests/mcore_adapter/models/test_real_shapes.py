"""Published models: the shapes of their config.json give the published numbers of parameters, tensor by tensor."""

import math
from typing import Any

import pytest
import torch

from helpers.tiny_models import checkpoint_tensors
from model_specs.families import parse_config
from model_specs.tensors import CORRECTION_BIAS, hf_shapes

_YARN = dict(type="yarn", factor=40, beta_fast=32, beta_slow=1, original_max_position_embeddings=4096)


def _dense(
    kind: str, hidden: int, ffn: int, layers: int, heads: int, kv: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return dict(
        model_type=kind,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=vocab,
        max_position_embeddings=4096,
        **more,
    )


# name -> (shape, parameters)
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen2.5-1.5B": (
        _dense("qwen2", 1536, 8960, 28, 12, 2, 151_936, tie_word_embeddings=True), 1_543_714_304,
    ),
    "Mistral-7B-v0.3": (_dense("mistral", 4096, 14_336, 32, 32, 8, 32_768, sliding_window=None), 7_248_023_552),
    "GLM-4-9B-0414": (
        _dense("glm4", 4096, 13_696, 40, 32, 2, 151_552, head_dim=128, attention_bias=True, partial_rotary_factor=0.5),
        9_400_279_040,
    ),
    "Qwen3-30B-A3B": (
        _dense(
            "qwen3_moe", 2048, 6144, 48, 32, 4, 151_936, head_dim=128, num_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        ),
        30_532_122_624,
    ),
    "DeepSeek-V2-Lite": (
        _dense(
            "deepseek_v2", 2048, 10_944, 27, 16, 16, 102_400, n_routed_experts=64, num_experts_per_tok=6,
            moe_intermediate_size=1408, n_shared_experts=2, first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=None,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, norm_topk_prob=False, scoring_func="softmax",
            topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.0, moe_layer_freq=1,
            rope_scaling={**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        ),
        15_706_484_224,
    ),
    "DeepSeek-V3": (
        _dense(
            "deepseek_v3", 7168, 18_432, 61, 128, 128, 129_280, n_routed_experts=256, num_experts_per_tok=8,
            moe_intermediate_size=2048, n_shared_experts=1, first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=1536,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, norm_topk_prob=True, scoring_func="sigmoid",
            topk_method="noaux_tc", n_group=8, topk_group=4, routed_scaling_factor=2.5, moe_layer_freq=1, ep_size=1,
            rope_scaling={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        671_026_404_352,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_has_its_published_number_of_parameters(name: str) -> None:
    raw, expected = PUBLISHED[name]
    shapes = hf_shapes(parse_config(raw), is_critic=False)
    parameters = [shape for key, shape in shapes.items() if not key.endswith(CORRECTION_BIAS)]
    assert sum(math.prod(shape) for shape in parameters) == expected


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "DeepSeek-V2-Lite", "Mistral-7B-v0.3", "GLM-4-9B-0414"])
def test_a_published_shape_is_that_of_transformers_tensor_by_tensor(name: str) -> None:
    import transformers

    raw, _ = PUBLISHED[name]
    config = transformers.AutoConfig.for_model(**raw)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = {key: tuple(x.shape) for key, x in checkpoint_tensors(dict(model.named_parameters())).items()}
    assert hf_shapes(parse_config(raw), is_critic=False) == theirs
