"""Qwen3 with experts (30B-A3B, ...): attention as in Qwen3, scores by softmax, no shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_specs.config import ModelConfig, parse_decoder
from model_specs.family import Family
from model_specs.moe import MoEConfig, parse_experts
from model_specs.values import ModelConfigError, boolean, num_layers, positive


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    return parse_decoder(raw, qk_norm=True, default_num_kv_heads=4, moe=_experts(raw))


def _experts(raw: Mapping[str, Any]) -> MoEConfig:
    num_experts, top_k = parse_experts(raw)
    step, dense = positive(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ModelConfigError(f"mlp_only_layers={dense!r} must be a list of layers")
    return MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=positive(raw, "moe_intermediate_size"),
        shared_intermediate_size=0,
        sparse_layers=tuple((i + 1) % step == 0 and i not in dense for i in range(num_layers(raw))),
        score_function="softmax",
        normalize=boolean(raw, "norm_topk_prob", False),
        scaling=1.0,
        num_groups=1,
        top_k_groups=1,
        group_score="max",
        correction_bias=False,
    )


def _ignored_by_servers(config: ModelConfig) -> tuple[str, ...]:
    """Return the keys that SGLang ignores: it builds experts in every layer and an output layer of its own."""
    assert config.moe is not None, "_parse() sets it"
    dense_layers = () if all(config.moe.sparse_layers) else ("mlp_only_layers, decoder_sparse_step",)
    return dense_layers + (("tie_word_embeddings",) if config.tied else ())


QWEN3_MOE = Family(architecture="Qwen3MoeForCausalLM", parse=_parse, ignored_by_servers=_ignored_by_servers)
