"""DeepSeek-V2: latent attention; dense layers first, then layers with experts."""

from __future__ import annotations

from typing import Any

from mcore_adapter.models.family import MegatronFamily
from mcore_adapter.models.overrides import expert_fields, latent_attention_fields
from mcore_adapter.models.parts import Part, dense_mlp, experts, input_norm, latent_attention, layer_prefix, mlp_norm
from model_specs.config import ModelConfig


def latent_layer(config: ModelConfig, layer: int) -> Part:
    """Return a layer with latent attention, and with experts where `config` has them."""
    assert config.moe is not None and config.mla is not None, "model_specs.families.deepseek_v2 and _v3 set them"
    hf = layer_prefix(layer)
    mlp = experts(config, config.moe, hf) if config.moe.sparse_layers[layer] else dense_mlp(config, hf)
    return input_norm(config, hf) | latent_attention(config, config.mla, hf) | mlp_norm(config, hf) | mlp


def latent_overrides(config: ModelConfig) -> dict[str, Any]:
    assert config.moe is not None and config.mla is not None, "model_specs.families.deepseek_v2 and _v3 set them"
    return latent_attention_fields(config, config.mla) | expert_fields(config.moe)


DEEPSEEK_V2 = MegatronFamily(layer=latent_layer, overrides=latent_overrides)
