"""The conversion tables by themselves: nothing left over on either side, nothing taken twice."""

import re
from typing import Any

import pytest
import torch

import model_specs.families
from helpers.hf_configs import DEEPSEEK_V2, DEEPSEEK_V3, QWEN2, QWEN3_MOE
from helpers.tiny_models import MODELS, checkpoint_tensors, make_model
from mcore_adapter.models.conversions import (
    Conversion,
    MergeGateUp,
    MergeQKV,
    SplitGateUp,
    canonical_name,
    layer_table,
    outer_table,
)
from model_specs.families import parse_config
from model_specs.tensors import CORRECTION_BIAS, hf_shapes
from model_specs.untrusted import ModelConfigError

FAMILIES: list[dict[str, Any]] = [
    {"model_type": "qwen2", "tie_word_embeddings": True},
    {"model_type": "qwen2", "tie_word_embeddings": False},
    {"model_type": "qwen3", "head_dim": 16},
    {"model_type": "llama", "tie_word_embeddings": False},
    {"model_type": "mistral", "sliding_window": None},
    {"model_type": "glm4", "head_dim": 16},
    {"model_type": "glm4", "head_dim": 16, "attention_bias": False},
    QWEN3_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
]


def test_every_family_is_in_these_tests() -> None:
    assert {family["model_type"] for family in FAMILIES} == set(model_specs.families.FAMILIES)


@pytest.mark.parametrize("is_critic", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f["model_type"])
def test_the_shards_of_all_ranks_cover_every_tensor_exactly_once(family, tp, is_critic) -> None:
    config = parse_config({**QWEN2, **family})
    shapes = hf_shapes(config, is_critic=is_critic)
    conversions: list[Conversion] = list(outer_table(config, is_critic=is_critic).values())
    for layer in range(config.num_layers):
        conversions += layer_table(config, layer).values()
    taken: dict[str, list[int]] = {name: [] for name in shapes}
    length: dict[str, int] = {}
    for conversion in conversions:
        dim = conversion.tp_dim or 0
        sizes = {name: shapes[name][dim] for name in conversion.names}
        length |= sizes
        for rank in range(tp if conversion.tp_dim is not None else 1):
            for piece in conversion.pieces(sizes, rank=rank, tp=tp):
                taken[piece.name] += range(piece.start, piece.stop)
    for name, rows in taken.items():
        assert sorted(rows) == list(range(length[name])), name


def test_qkv_is_grouped_by_key_value_head() -> None:
    merge = MergeQKV("q", "k", "v", num_kv_heads=2)  # 4 query heads of 3 rows
    rows = [
        f"{p.name}{i}" for p in merge.pieces({"q": 12, "k": 6, "v": 6}, rank=0, tp=1) for i in range(p.start, p.stop)
    ]
    first = ["q0", "q1", "q2", "q3", "q4", "q5", "k0", "k1", "k2", "v0", "v1", "v2"]
    assert rows[:12] == first
    assert [re.sub(r"\d+", "", row) for row in rows] == [row[0] for row in first] * 2
    halves = [merge.pieces({"q": 12, "k": 6, "v": 6}, rank=rank, tp=2) for rank in range(2)]
    assert halves[0] + halves[1] == merge.pieces({"q": 12, "k": 6, "v": 6}, rank=0, tp=1)


def test_every_rank_has_its_gate_rows_before_its_up_rows() -> None:
    pieces = MergeGateUp("gate", "up").pieces({"gate": 8, "up": 8}, rank=1, tp=2)
    assert [(p.name, p.start, p.stop) for p in pieces] == [("gate", 4, 8), ("up", 4, 8)]


def test_a_fused_gate_and_up_projection_is_cut_like_two_tensors() -> None:
    pieces = SplitGateUp("gate_up").pieces({"gate_up": 16}, rank=1, tp=2)
    assert [(p.name, p.start, p.stop) for p in pieces] == [("gate_up", 4, 8), ("gate_up", 12, 16)]


def test_key_value_heads_that_tensor_parallelism_cannot_share_are_an_error() -> None:
    with pytest.raises(ModelConfigError, match="num_key_value_heads: size 2 .* 4"):
        MergeQKV("q", "k", "v", num_kv_heads=2).pieces({"q": 8, "k": 4, "v": 4}, rank=0, tp=4)


def test_norms_inside_the_next_linear_layer_are_the_same_parameters() -> None:
    table = layer_table(parse_config(QWEN2), 1)
    for spelling, name in (
        ("self_attention.linear_qkv.layer_norm_weight", "model.layers.1.input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "model.layers.1.post_attention_layernorm.weight"),
        ("input_layernorm.weight", "model.layers.1.input_layernorm.weight"),
        ("pre_mlp_layernorm.weight", "model.layers.1.post_attention_layernorm.weight"),
    ):
        assert table[canonical_name(spelling)].names == (name,)


def test_experts_have_one_name_however_they_are_stored_and_wherever_they_lie() -> None:
    table = layer_table(parse_config({**QWEN2, **QWEN3_MOE}), 1)
    for spelling in ("mlp.experts.local_experts.1.linear_fc2.weight", "mlp.experts.linear_fc2.weight1"):
        assert table[canonical_name(spelling)].names == ("model.layers.1.mlp.experts.1.down_proj.weight",)
        assert table[canonical_name(spelling, 2)].names == ("model.layers.1.mlp.experts.3.down_proj.weight",)


def test_the_shapes_are_those_of_transformers() -> None:
    for name in MODELS:
        model = make_model(name)
        shapes = hf_shapes(parse_config(model.config.to_dict()), is_critic=False)
        tensors = dict(model.named_parameters())
        tensors |= {key: bias for key, bias in model.named_buffers() if key.endswith(CORRECTION_BIAS)}
        expected = {key: tuple(tensor.shape) for key, tensor in checkpoint_tensors(tensors).items()}
        assert dict(sorted(shapes.items())) == dict(sorted(expected.items())), name
        parameters = [shape for key, shape in shapes.items() if not key.endswith(CORRECTION_BIAS)]
        assert sum(torch.Size(shape).numel() for shape in parameters) == model.num_parameters()
