"""Mixture of experts and latent attention of a model; what several families read of them in config.json.

Invariant: as in config.py, a config that exists describes what the router and Megatron's layers here compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from model_specs.values import ModelConfigError, positive, require


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


def parse_experts(raw: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of experts of a layer and of those that a token passes through. Raises ModelConfigError."""
    key = next((k for k in ("num_experts", "num_local_experts", "n_routed_experts") if raw.get(k) is not None), None)
    if key is None:
        raise ModelConfigError("num_experts=None must be a positive integer")
    num_experts, top_k = positive(raw, key), positive(raw, "num_experts_per_tok")
    if top_k > num_experts:
        raise ModelConfigError(f"num_experts_per_tok={top_k} must not exceed {key}={num_experts}")
    return num_experts, top_k


def parse_groups(raw: Mapping[str, Any], num_experts: int, top_k: int) -> tuple[int, int]:
    """Return the number of groups of experts and of those that a token's experts come from. Raises ModelConfigError."""
    num_groups, top_k_groups = positive(raw, "n_group", 1), positive(raw, "topk_group", 1)
    if num_experts % num_groups or top_k_groups > num_groups or top_k > num_experts // num_groups * top_k_groups:
        raise ModelConfigError(
            f"n_group={num_groups}, topk_group={top_k_groups}: {num_experts} experts must divide into the groups, and "
            f"topk_group of them must hold num_experts_per_tok={top_k} experts"
        )
    return num_groups, top_k_groups


def parse_mla(raw: Mapping[str, Any]) -> MLAConfig:
    """Return the latent attention of a DeepSeek model. Raises ModelConfigError."""
    # The norms of the compressed vectors take transformers' default there, whatever rms_norm_eps is.
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
