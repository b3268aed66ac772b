"""Which layers of a pipeline stage have experts; both devices build their layers by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset


def stage_layers(
    config: TransformerConfig, vp_stage: int | None, make: Callable[[int | None], ModuleSpec]
) -> list[ModuleSpec]:
    """Return the layers of this stage; make(number of experts) builds one, make(None) a dense one."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    kinds: dict[bool, ModuleSpec] = {}
    for layer in layers:
        if (sparse := _has_experts(config, layer)) not in kinds:
            kinds[sparse] = make(config.num_moe_experts if sparse else None)
    return [kinds[_has_experts(config, layer)] for layer in layers]


def _has_experts(config: TransformerConfig, layer: int) -> bool:
    if config.num_moe_experts is None:
        return False
    return config.moe_layer_freq == 1 or bool(cast(Any, config.moe_layer_freq)[layer])
