"""Megatron's TransformerConfig for a ModelConfig on a layout and device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn

from allocation import ParallelLayout, layers_of_chunks
from mcore_adapter.device import Device
from mcore_adapter.parallel import ParallelState
from mcore_adapter.settings import Fp8Recipe
from model_specs.config import MLAConfig, ModelConfig, MoEConfig, YarnRopeScaling

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


def transformer_config(
    config: ModelConfig,
    *,
    parallel: ParallelState,
    device: Device,
    dtype: torch.dtype,
    sequence_parallel: bool,
    fp8: Fp8Recipe | None = None,
) -> TransformerConfig:
    """Return Megatron's own configuration of this model on this device."""
    layout = parallel.layout
    interleaved = layout.vpp > 1
    fields = _fields(config)
    if config.num_layers % (layout.pp * layout.vpp):
        fields["pipeline_model_parallel_layout"] = _uneven(config.num_layers, layout)
    make = MLATransformerConfig if config.mla else TransformerConfig
    return make(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        qk_layernorm=config.qk_norm or config.mla is not None,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if interleaved else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # required by variable_seq_lengths, dense models included
        calculate_per_token_loss=True,
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # Scaled by present maxima: no history that a checkpoint would have to hold. Gradients of whole tensors need the
        # range of e5m2; blocks of 128 values do not.
        fp8={None: None, "tensorwise": "hybrid", "blockwise": "e4m3"}[fp8],
        fp8_recipe=fp8 or "tensorwise",
        **{**device.config_overrides(), **fields},
    )


def _uneven(num_layers: int, layout: ParallelLayout) -> list[list[str]]:
    stages = [["decoder"] * len(layers) for layers in layers_of_chunks(num_layers, layout)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def _fields(config: ModelConfig) -> dict[str, object]:
    """Return the fields that a dense decoder with plain rotary embeddings does not set."""
    fields: dict[str, object] = {}
    if config.rope_interleaved:
        # Megatron's fused kernel for packed sequences takes no rotary_interleaved.
        fields |= dict(rotary_interleaved=True, apply_rope_fusion=False)
    if config.mla is not None:
        fields |= _latent_attention_fields(config, config.mla)
    return fields if config.moe is None else fields | _expert_fields(config.moe)


def _expert_fields(moe: MoEConfig) -> dict[str, object]:
    """Return the fields of mixtures of experts. Which experts a token goes to is decided in router.py."""
    return dict(
        num_moe_experts=moe.num_experts,
        moe_ffn_hidden_size=moe.intermediate_size,
        moe_shared_expert_intermediate_size=moe.shared_intermediate_size or None,
        moe_layer_freq=1 if all(moe.sparse_layers) else [int(sparse) for sparse in moe.sparse_layers],
        moe_router_topk=moe.top_k,
        moe_router_pre_softmax=True,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
    )


def _latent_attention_fields(config: ModelConfig, mla: MLAConfig) -> dict[str, object]:
    """Return the fields of latent attention and of its rotary embedding."""
    rope: dict[str, object] = dict(rope_type="rope", rotary_base=config.rope_theta, apply_rope_fusion=False)
    scaling = config.rope_scaling
    if isinstance(scaling, YarnRopeScaling):
        rope |= dict(
            rope_type="yarn",
            rotary_scaling_factor=scaling.factor,
            original_max_position_embeddings=scaling.original_max_position_embeddings,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
            mscale=scaling.mscale,
            mscale_all_dim=scaling.mscale_all_dim,
        )
    return rope | dict(
        q_lora_rank=mla.q_lora_rank,
        kv_lora_rank=mla.kv_lora_rank,
        qk_head_dim=mla.qk_nope_head_dim,
        qk_pos_emb_head_dim=mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
    )
