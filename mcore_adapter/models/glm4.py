"""GLM-4: the outputs of attention and MLP are normed too; rotary pairs are neighbours, in half of each head."""

from __future__ import annotations

from typing import Any

from mcore_adapter.models.family import MegatronFamily
from mcore_adapter.models.parts import Part, attention, fused_gated_mlp, input_norm, layer_prefix, mlp_norm, norm
from model_specs.config import ModelConfig


def _layer(config: ModelConfig, layer: int) -> Part:
    hf, hidden = layer_prefix(layer), config.hidden_size
    return (
        input_norm(config, hf)
        | attention(config, hf)
        | norm("post_self_attn_layernorm", f"{hf}post_self_attn_layernorm", hidden)
        | mlp_norm(config, hf)
        | fused_gated_mlp("mlp.", f"{hf}mlp.", hidden, config.intermediate_size)
        | norm("post_mlp_layernorm", f"{hf}post_mlp_layernorm", hidden)
    )


def _overrides(config: ModelConfig) -> dict[str, Any]:
    # Megatron's fused kernel for packed sequences takes no rotary_interleaved.
    return dict(rotary_interleaved=True, apply_rope_fusion=False)


GLM4 = MegatronFamily(layer=_layer, overrides=_overrides)
