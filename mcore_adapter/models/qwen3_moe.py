"""Qwen3 with experts: attention as in Qwen3; layers with experts, others with a dense MLP."""

from __future__ import annotations

from typing import Any

from mcore_adapter.models.family import MegatronFamily
from mcore_adapter.models.overrides import expert_fields
from mcore_adapter.models.parts import Part, attention, dense_mlp, experts, input_norm, layer_prefix, mlp_norm
from model_specs.config import ModelConfig


def _layer(config: ModelConfig, layer: int) -> Part:
    assert config.moe is not None, "model_specs.families.qwen3_moe sets it"
    hf = layer_prefix(layer)
    mlp = experts(config, config.moe, hf) if config.moe.sparse_layers[layer] else dense_mlp(config, hf)
    return input_norm(config, hf) | attention(config, hf) | mlp_norm(config, hf) | mlp


def _overrides(config: ModelConfig) -> dict[str, Any]:
    assert config.moe is not None, "model_specs.families.qwen3_moe sets it"
    return expert_fields(config.moe)


QWEN3_MOE = MegatronFamily(layer=_layer, overrides=_overrides)
