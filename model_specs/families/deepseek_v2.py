"""DeepSeek-V2 and V2-Lite: latent attention, scores by softmax, shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_specs.config import ModelConfig, parse_decoder
from model_specs.family import Family
from model_specs.moe import MoEConfig, parse_experts, parse_groups, parse_mla
from model_specs.server_parts import DECODER, Rows, ServerParts, WholeRows
from model_specs.values import ModelConfigError, num_layers, number, positive, require


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    return parse_decoder(raw, rope_types=("default", "yarn"), moe=_experts(raw), mla=parse_mla(raw))


def _experts(raw: Mapping[str, Any]) -> MoEConfig:
    num_experts, top_k = parse_experts(raw)
    require(raw, {"scoring_func": "softmax", "moe_layer_freq": 1, "ep_size": 1, "norm_topk_prob": False})
    method = raw.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelConfigError(f"topk_method={method!r} is not supported; supported: greedy, group_limited_greedy")
    groups = parse_groups(raw, num_experts, top_k) if method == "group_limited_greedy" else (1, 1)
    dense, width = positive(raw, "first_k_dense_replace", 0, least=0), positive(raw, "moe_intermediate_size")
    return MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=width,
        shared_intermediate_size=width * positive(raw, "n_shared_experts"),
        sparse_layers=tuple(i >= dense for i in range(num_layers(raw))),
        score_function="softmax",
        normalize=False,
        scaling=number(raw, "routed_scaling_factor", 1.0),
        num_groups=groups[0],
        top_k_groups=groups[1],
        group_score="max",
        correction_bias=False,
    )


def latent_server_parts(config: ModelConfig) -> ServerParts:
    """Return where servers hold latent attention: projections up are cut by heads, those down are whole on every rank,
    and one parameter where queries are compressed too."""
    assert config.mla is not None, "the parsers of DeepSeek set it"
    up = {module: Rows(module) for module in ("q_proj", "q_b_proj", "kv_b_proj")}
    parts = {module: place for module, place in DECODER.items() if module not in ("k_proj", "v_proj")} | up
    if config.mla.q_lora_rank is None:
        return parts
    into = "fused_qkv_a_proj_with_mqa"
    return {**parts, "q_a_proj": WholeRows(into), "kv_a_proj_with_mqa": WholeRows(into, config.mla.q_lora_rank)}


def latent_server_keys(config: ModelConfig) -> Mapping[str, Any]:
    """Return what SGLang's model reads of config.json without a default, or with another one than here. It routes by
    groups whatever topk_method is."""
    assert config.moe is not None and config.mla is not None, "the parsers of DeepSeek set them"
    moe = config.moe
    keys = {
        "q_lora_rank": config.mla.q_lora_rank,
        "scoring_func": moe.score_function,
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.scaling,
        "n_group": moe.num_groups,
        "topk_group": moe.top_k_groups,
        "topk_method": "noaux_tc" if moe.correction_bias else config.raw.get("topk_method") or "greedy",
        "moe_layer_freq": 1,
        "first_k_dense_replace": moe.sparse_layers.index(True) if any(moe.sparse_layers) else config.num_layers,
    }
    return {key: value for key, value in keys.items() if config.raw.get(key, _ABSENT) != value}


_ABSENT = object()
DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    parse=_parse,
    server_parts=latent_server_parts,
    server_keys=latent_server_keys,
)
