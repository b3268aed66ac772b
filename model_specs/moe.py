"""Mixture of experts and latent attention of a model, read from config.json.

Invariant: as in hf_config.py, a config that exists describes what the router and Megatron's layers here compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from model_specs.values import ModelConfigError, number, positive, require

MOE_TYPES = ("qwen3_moe", "deepseek_v2", "deepseek_v3")
MLA_TYPES = ("deepseek_v2", "deepseek_v3")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Which layers have experts, and how a token chooses among them."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Of each expert."""
    shared_intermediate_size: int
    """Of the experts that every token passes through, together; 0: none."""
    sparse_layers: tuple[bool, ...]
    """For each layer, whether it has experts (or a dense MLP)."""
    score_function: Literal["softmax", "sigmoid"]
    normalize: bool
    """The chosen experts' scores are divided by their sum."""
    scaling: float
    num_groups: int
    top_k_groups: int
    """Experts are chosen out of this many of num_groups groups; equal: out of all."""
    group_score: Literal["max", "top2"]
    """What ranks the groups: their best expert, or the sum of their best two."""
    correction_bias: bool
    """A bias per expert, no parameter, is added to the scores for choosing (balance without an auxiliary loss)."""


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-latent attention: keys and values (queries, where q_lora_rank is set) come from a compressed vector; a part
    of each head is rotated."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def parse_moe(raw: Mapping[str, Any], model_type: str) -> MoEConfig | None:
    """None for dense models. Raises ModelConfigError."""
    if model_type not in MOE_TYPES:
        return None
    num_layers = positive(raw, "num_hidden_layers")
    key = next((k for k in ("num_experts", "num_local_experts", "n_routed_experts") if raw.get(k) is not None), None)
    if key is None:
        raise ModelConfigError("num_experts=None must be a positive integer")
    num_experts, top_k = positive(raw, key), positive(raw, "num_experts_per_tok")
    if top_k > num_experts:
        raise ModelConfigError(f"num_experts_per_tok={top_k} must not exceed {key}={num_experts}")
    if model_type == "qwen3_moe":
        step, dense = positive(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
        return MoEConfig(
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=positive(raw, "moe_intermediate_size"),
            shared_intermediate_size=0,
            sparse_layers=tuple((i + 1) % step == 0 and i not in dense for i in range(num_layers)),
            score_function="softmax",
            normalize=bool(raw.get("norm_topk_prob", False)),
            scaling=1.0,
            num_groups=1,
            top_k_groups=1,
            group_score="max",
            correction_bias=False,
        )
    return _deepseek(raw, model_type, num_layers=num_layers, num_experts=num_experts, top_k=top_k)


def _deepseek(raw: Mapping[str, Any], model_type: str, *, num_layers: int, num_experts: int, top_k: int) -> MoEConfig:
    is_v3 = model_type == "deepseek_v3"
    require(raw, {"scoring_func": "sigmoid" if is_v3 else "softmax", "moe_layer_freq": 1, "ep_size": 1})
    if is_v3:
        require(raw, {"topk_method": "noaux_tc"})
    else:
        require(raw, {"norm_topk_prob": False})
    method = raw.get("topk_method") or "greedy"
    if not is_v3 and method not in ("greedy", "group_limited_greedy"):
        raise ModelConfigError(f"topk_method={method!r} is not supported; supported: greedy, group_limited_greedy")
    grouped = is_v3 or method == "group_limited_greedy"
    num_groups = positive(raw, "n_group", 1) if grouped else 1
    top_k_groups = positive(raw, "topk_group", 1) if grouped else 1
    if num_experts % num_groups or top_k_groups > num_groups or top_k > num_experts // num_groups * top_k_groups:
        raise ModelConfigError(
            f"n_group={num_groups}, topk_group={top_k_groups}: {num_experts} experts must divide into the groups, and "
            f"topk_group of them must hold num_experts_per_tok={top_k} experts"
        )
    dense = raw.get("first_k_dense_replace") or 0
    width = positive(raw, "moe_intermediate_size")
    return MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=width,
        shared_intermediate_size=width * positive(raw, "n_shared_experts"),
        sparse_layers=tuple(i >= dense for i in range(num_layers)),
        score_function="sigmoid" if is_v3 else "softmax",
        normalize=is_v3 and bool(raw.get("norm_topk_prob", True)),
        scaling=number(raw, "routed_scaling_factor", 2.5 if is_v3 else 1.0),
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        group_score="top2" if is_v3 else "max",
        correction_bias=is_v3,
    )


def parse_mla(raw: Mapping[str, Any], model_type: str) -> MLAConfig | None:
    """None for models with plain attention. Raises ModelConfigError."""
    if model_type not in MLA_TYPES:
        return None
    # The norms of the compressed vectors take transformers' default there, whatever rms_norm_eps says.
    require(raw, {"rms_norm_eps": 1e-6, "rope_interleave": True})
    heads = positive(raw, "num_attention_heads")
    require(raw, {"num_key_value_heads": heads})
    return MLAConfig(
        q_lora_rank=None if raw.get("q_lora_rank") is None else positive(raw, "q_lora_rank"),
        kv_lora_rank=positive(raw, "kv_lora_rank"),
        qk_nope_head_dim=positive(raw, "qk_nope_head_dim"),
        qk_rope_head_dim=positive(raw, "qk_rope_head_dim"),
        v_head_dim=positive(raw, "v_head_dim"),
    )
