"""Llama: plain attention and a gated MLP in every layer."""

from __future__ import annotations

from mcore_adapter.models.family import MegatronFamily
from mcore_adapter.models.parts import Part, attention, dense_mlp, input_norm, layer_prefix, mlp_norm
from model_specs.config import ModelConfig


def decoder_layer(config: ModelConfig, layer: int) -> Part:
    """Return a dense layer, with the biases and norms in its attention that `config` has."""
    hf = layer_prefix(layer)
    return input_norm(config, hf) | attention(config, hf) | mlp_norm(config, hf) | dense_mlp(config, hf)


LLAMA = MegatronFamily(layer=decoder_layer)
