"""DeepSeek-V3 and R1: as V2, with scores by sigmoid, groups of experts and correction biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_specs.config import ModelConfig, parse_decoder
from model_specs.families.deepseek_v2 import latent_server_keys, latent_server_parts
from model_specs.family import Family
from model_specs.moe import MoEConfig, parse_experts, parse_groups, parse_mla
from model_specs.values import boolean, num_layers, number, positive, require


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    return parse_decoder(raw, rope_types=("default", "yarn"), moe=_experts(raw), mla=parse_mla(raw))


def _experts(raw: Mapping[str, Any]) -> MoEConfig:
    num_experts, top_k = parse_experts(raw)
    require(raw, {"scoring_func": "sigmoid", "moe_layer_freq": 1, "ep_size": 1, "topk_method": "noaux_tc"})
    groups = parse_groups({"n_group": 8, "topk_group": 4, **raw}, num_experts, top_k)
    dense, width = positive(raw, "first_k_dense_replace", 3, least=0), positive(raw, "moe_intermediate_size")
    return MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=width,
        shared_intermediate_size=width * positive(raw, "n_shared_experts"),
        sparse_layers=tuple(i >= dense for i in range(num_layers(raw))),
        score_function="sigmoid",
        normalize=boolean(raw, "norm_topk_prob", True),
        scaling=number(raw, "routed_scaling_factor", 2.5),
        num_groups=groups[0],
        top_k_groups=groups[1],
        group_score="top2",
        correction_bias=True,
    )


def _ignored_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Return the prefixes of the layers after the last one, which predict further tokens and are not trained here."""
    return (f"model.layers.{config.num_layers}.",)


DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    parse=_parse,
    server_parts=latent_server_parts,
    server_keys=latent_server_keys,
    ignored_tensors=_ignored_tensors,
)
