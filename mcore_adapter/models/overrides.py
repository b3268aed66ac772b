"""Fields of Megatron's TransformerConfig that several families set."""

from __future__ import annotations

from typing import Any

from model_specs.config import ModelConfig
from model_specs.moe import MLAConfig, MoEConfig
from model_specs.rope import YarnRopeScaling


def expert_fields(moe: MoEConfig) -> dict[str, Any]:
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


def latent_attention_fields(config: ModelConfig, mla: MLAConfig) -> dict[str, Any]:
    """Return the fields of latent attention and of its rotary embedding."""
    rope: dict[str, Any] = dict(rope_type="rope", rotary_base=config.rope_theta, apply_rope_fusion=False)
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
