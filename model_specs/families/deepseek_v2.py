"""DeepSeek-V2 and V2-Lite: latent attention, scores by softmax, shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_specs.config import ModelConfig, parse_decoder
from model_specs.family import Family
from model_specs.moe import MoEConfig, parse_experts, parse_groups, parse_mla
from model_specs.values import ModelConfigError, number, positive, require


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    return parse_decoder(raw, rope_types=("default", "yarn"), moe=_experts(raw), mla=parse_mla(raw))


def _experts(raw: Mapping[str, Any]) -> MoEConfig:
    num_experts, top_k = parse_experts(raw)
    require(raw, {"scoring_func": "softmax", "moe_layer_freq": 1, "ep_size": 1, "norm_topk_prob": False})
    method = raw.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelConfigError(f"topk_method={method!r} is not supported; supported: greedy, group_limited_greedy")
    groups = parse_groups(raw if method == "group_limited_greedy" else {}, num_experts, top_k)
    dense, width = raw.get("first_k_dense_replace") or 0, positive(raw, "moe_intermediate_size")
    return MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=width,
        shared_intermediate_size=width * positive(raw, "n_shared_experts"),
        sparse_layers=tuple(i >= dense for i in range(positive(raw, "num_hidden_layers"))),
        score_function="softmax",
        normalize=False,
        scaling=number(raw, "routed_scaling_factor", 1.0),
        num_groups=groups[0],
        top_k_groups=groups[1],
        group_score="max",
        correction_bias=False,
    )


DEEPSEEK_V2 = Family(architecture="DeepseekV2ForCausalLM", parse=_parse)
