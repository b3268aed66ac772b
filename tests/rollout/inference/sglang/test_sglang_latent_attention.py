"""DeepSeek models on SGLang servers: where their tensors lie, how they are loaded, and what config.json means there.

A real server with such models: test_sglang_families.py.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.sglang_environment import replica
from model_specs.config import ModelConfig
from model_specs.families import parse_config
from rollout.inference.changes import Changed
from rollout.inference.sglang.arguments import decided_elsewhere
from rollout.inference.sglang.checksums import ExpectedChecksums, ModelShape
from rollout.inference.sglang.hooks.checksums import position_checksum
from rollout.inference.sglang.hooks.models import copy_fused_parts
from rollout.inference.sglang.server import server_flags

HEADS, HIDDEN, RANK = 4, 16, 6
V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 70, "hidden_size": HIDDEN, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 64,
    "q_lora_rank": RANK, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
}  # fmt: skip
ATTENTION, SHARED = "model.layers.0.self_attn.", "model.layers.0.mlp.shared_experts."
BIAS = "model.layers.0.mlp.gate.e_score_correction_bias"


def config(**changes: Any) -> ModelConfig:
    return parse_config(V3 | changes)


def tensors(q_lora_rank: int | None) -> dict[str, Tensor]:
    """What a checkpoint has of one layer, apart from its routed experts."""
    sizes: dict[str, tuple[int, ...]] = {f"{ATTENTION}q_proj.weight": (HEADS * 6, HIDDEN)}
    if q_lora_rank is not None:
        sizes = {
            f"{ATTENTION}q_a_proj.weight": (RANK, HIDDEN),
            f"{ATTENTION}q_a_layernorm.weight": (RANK,),
            f"{ATTENTION}q_b_proj.weight": (HEADS * 6, RANK),
        }
    sizes |= {
        f"{ATTENTION}kv_a_proj_with_mqa.weight": (10, HIDDEN),
        f"{ATTENTION}kv_b_proj.weight": (HEADS * 7, 8),
        f"{ATTENTION}o_proj.weight": (HIDDEN, HEADS * 3),
        f"{SHARED}gate_proj.weight": (8, HIDDEN),
        f"{SHARED}up_proj.weight": (8, HIDDEN),
        f"{SHARED}down_proj.weight": (HIDDEN, 8),
        BIAS: (4,),
    }
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def on_server(full: dict[str, Tensor], tp: int, rank: int) -> dict[str, Tensor]:
    """The parameters of one rank as SGLang's DeepseekV2ForCausalLM holds them."""
    held = dict(full)
    down = held.pop(f"{ATTENTION}kv_a_proj_with_mqa.weight")
    if f"{ATTENTION}q_a_proj.weight" in held:
        held[f"{ATTENTION}fused_qkv_a_proj_with_mqa.weight"] = torch.cat(
            [held.pop(f"{ATTENTION}q_a_proj.weight"), down]
        )
    else:
        held[f"{ATTENTION}kv_a_proj_with_mqa.weight"] = down
    for name in [f"{ATTENTION}{module}.weight" for module in ("q_proj", "q_b_proj", "kv_b_proj")]:
        if name in held:
            held[name] = torch.cat(
                held[name].split(len(held[name]) // HEADS)[rank * HEADS // tp : (rank + 1) * HEADS // tp]
            )
    halves = [held.pop(f"{SHARED}{part}_proj.weight").chunk(tp)[rank] for part in ("gate", "up")]
    held[f"{SHARED}gate_up_proj.weight"] = torch.cat(halves)
    for name in (f"{SHARED}down_proj.weight", f"{ATTENTION}o_proj.weight"):
        held[name] = held[name].chunk(tp, dim=1)[rank]
    return held


@pytest.mark.parametrize("q_lora_rank", [RANK, None])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_checksums_follow_latent_attention_and_shared_experts(tp: int, q_lora_rank: int | None) -> None:
    full = tensors(q_lora_rank)
    expected = ExpectedChecksums(ModelShape.from_config(config(q_lora_rank=q_lora_rank)), tp=tp)
    expected.add(dict(reversed(full.items())))
    ranks = [on_server(full, tp, rank) for rank in range(tp)]
    assert expected.mismatches([{name: int(position_checksum(t)) for name, t in held.items()} for held in ranks]) == []
    for held in ranks:
        name = f"{ATTENTION}kv_b_proj.weight"
        held[name] = held[name].clone().flip(0)
    wrong = expected.mismatches([{name: int(position_checksum(t)) for name, t in held.items()} for held in ranks])
    assert wrong == [f"{ATTENTION}kv_b_proj.weight (rank {rank})" for rank in range(tp)]


def load(model: Any, weights: list[tuple[str, Tensor]]) -> list[str]:
    """What is left for SGLang's own loader."""
    (_, rest, flag), options = copy_fused_parts(model, iter(weights), True, other=1)
    assert flag is True and options == {"other": 1}
    return [name for name, _ in rest]


def test_each_half_of_a_fused_parameter_is_loaded_when_it_comes_alone() -> None:
    name = f"{ATTENTION}fused_qkv_a_proj_with_mqa.weight"
    fused = torch.nn.Parameter(torch.zeros(RANK + 10, HIDDEN), requires_grad=False)
    model = SimpleNamespace(
        quant_config=None, config=SimpleNamespace(q_lora_rank=RANK), named_parameters=lambda: [(name, fused)]
    )
    full = tensors(RANK)
    query, down = (f"{ATTENTION}{module}.weight" for module in ("q_a_proj", "kv_a_proj_with_mqa"))
    norm = f"{ATTENTION}q_a_layernorm.weight"
    assert load(model, [(query, full[query]), (norm, full[norm])]) == [norm]
    assert torch.equal(fused[:RANK], full[query]) and not fused[RANK:].any()
    assert load(model, [(down, full[down])]) == []
    assert torch.equal(fused, torch.cat([full[query], full[down]]))
    change = Changed.of(full[down].shape, torch.tensor([HIDDEN + 2]), torch.tensor([9.0]))
    assert load(model, [(down, change)]) == []
    assert fused[RANK + 1, 2] == 9.0 and (fused != torch.cat([full[query], full[down]])).sum() == 1
    elsewhere = query.replace("layers.0", "layers.7")  # of another pipeline stage
    assert load(model, [(elsewhere, full[query])]) == [elsewhere]
    quantized = SimpleNamespace(**{**vars(model), "quant_config": object()})
    assert load(quantized, [(query, full[query])]) == [query]


def flags(model: ModelConfig, **given: Any) -> dict[str, Any]:
    settings = replica(name="generator-0", model_path="/m", log_file=Path("log"), gpus=(0,), flags=given)
    return server_flags(settings, model, port=1, nccl_port=2)


def test_shared_experts_stay_in_parameters_of_their_own() -> None:
    assert flags(config())["disable_shared_experts_fusion"] is True
    plain = parse_config({**V3, "model_type": "qwen2"})
    assert not flags(plain).keys() & {"disable_shared_experts_fusion", "json_model_override_args"}
    for name in ("enforce_shared_experts_fusion", "disable_shared_experts_fusion"):
        assert "pushed weights need shared experts" in (decided_elsewhere(name) or "")


def test_servers_get_the_keys_that_a_config_lacks_with_what_they_mean_here() -> None:
    override = json.loads(flags(config(), json_model_override_args='{"rope_theta": 2.0}')["json_model_override_args"])
    assert override == {
        "rope_theta": 2.0, "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc", "moe_layer_freq": 1,
    }  # fmt: skip
    whole = config(**{key: value for key, value in override.items() if key != "rope_theta"})
    assert "json_model_override_args" not in flags(whole)


def test_servers_route_without_groups_where_the_method_has_none() -> None:
    v2 = {"model_type": "deepseek_v2", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.0}
    greedy = json.loads(flags(config(**v2, topk_method="greedy"))["json_model_override_args"])
    assert (greedy["n_group"], greedy["topk_group"], greedy["scoring_func"]) == (1, 1, "softmax")
    grouped = json.loads(flags(config(**v2, topk_method="group_limited_greedy"))["json_model_override_args"])
    assert not grouped.keys() & {"n_group", "topk_group", "topk_method", "routed_scaling_factor"}
