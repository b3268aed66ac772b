"""Layers that norm the outputs of attention and MLP before they are added to the residual: ModelConfig.post_norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

AddToResidual = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]
"""(output and bias, residual, dropout) -> their sum."""


class SandwichLayer(TransformerLayer):
    """Megatron's layer with two more norms. `norm`: their class, that of the final norm."""

    def __init__(
        self, config: TransformerConfig, submodules: TransformerLayerSubmodules, *, norm: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, **kwargs)
        settings = dict(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.post_self_attn_layernorm = build_module(norm, **settings)
        self.post_mlp_layernorm = build_module(norm, **settings)
        adders: Any = self  # Megatron's attributes have no types
        self.self_attn_bda = partial(_norm_then_add, self.post_self_attn_layernorm, adders.self_attn_bda)
        self.mlp_bda = partial(_norm_then_add, self.post_mlp_layernorm, adders.mlp_bda)


def _norm_then_add(
    norm: nn.Module, adder: Callable[[bool, bool], AddToResidual], training: bool, fused: bool
) -> AddToResidual:
    """Take the place of Megatron's get_bias_dropout_add(training, fused)."""

    def add(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        assert output[1] is None, "no supported family has a bias here"
        return adder(training, fused)((norm(output[0]), None), residual, dropout)

    return add


def install_post_norms(spec: TransformerBlockSubmodules) -> None:
    """Make every layer of `spec` a SandwichLayer."""
    for layer in spec.layer_specs or ():
        layer.module, layer.params = SandwichLayer, {**layer.params, "norm": spec.layer_norm}
