"""Layers of a pipeline stage: which have experts, and which norm the outputs of attention and MLP too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn

from mcore_adapter.device import Device

AddToResidual = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]
"""(output and bias, residual, dropout) -> their sum."""


def block_spec(device: Device, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage (of its virtual stage `vp_stage`)."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    kinds: dict[bool, ModuleSpec] = {}
    for layer in layers:
        if (sparse := _has_experts(config, layer)) not in kinds:
            kinds[sparse] = device.layer_spec(config, config.num_moe_experts if sparse else None)
    specs = [kinds[_has_experts(config, layer)] for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=device.final_norm)


def _has_experts(config: TransformerConfig, layer: int) -> bool:
    if config.num_moe_experts is None:
        return False
    return config.moe_layer_freq == 1 or bool(cast(Any, config.moe_layer_freq)[layer])


def install_post_norms(spec: TransformerBlockSubmodules) -> None:
    """Make every layer of `spec` a SandwichLayer."""
    for layer in spec.layer_specs or ():
        layer.module, layer.params = SandwichLayer, {**layer.params, "norm": spec.layer_norm}


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
