"""Mixture of experts and latent attention of a model; what several families read of them in config.json.

Invariant: as in config.py, a config that exists describes what the router and Megatron's layers here compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from model_specs.values import ModelConfigError, RawConfig, optional, positive, require


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


def gathers_tokens(num_ranks: int, top_k: int) -> bool:
    """Return whether expert-parallel ranks gather each other's tokens, instead of the copies for their experts: those
    take more bytes where each token has more experts than there are ranks."""
    return 1 < num_ranks <= top_k


def parse_experts(raw: RawConfig) -> tuple[int, int]:
    """Return the number of experts of a layer and of those that a token passes through. Raises ModelConfigError."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    key = next((key for key in keys if raw.get(key) is not None), "num_experts")
    num_experts, top_k = positive(raw, key, most=4096), positive(raw, "num_experts_per_tok")
    if any(raw.get(other) not in (None, num_experts) for other in keys):
        raise ModelConfigError(f"{', '.join(f'{other}={raw.get(other)!r}' for other in keys)}: they must be equal")
    if top_k > num_experts:
        raise ModelConfigError(f"num_experts_per_tok={top_k} must not exceed {key}={num_experts}")
    return num_experts, top_k


def parse_groups(raw: RawConfig) -> tuple[int, int]:
    """Return the number of groups of experts and of those that a token's experts come from. Raises ModelConfigError."""
    num_experts, top_k = parse_experts(raw)
    num_groups, top_k_groups = positive(raw, "n_group"), positive(raw, "topk_group")
    if num_experts % num_groups or top_k_groups > num_groups or top_k > num_experts // num_groups * top_k_groups:
        raise ModelConfigError(
            f"n_group={num_groups}, topk_group={top_k_groups}: {num_experts} experts must divide into the groups, and "
            f"topk_group of them must hold num_experts_per_tok={top_k} experts"
        )
    return num_groups, top_k_groups


def parse_mla(raw: RawConfig) -> MLAConfig:
    """Return the latent attention of a DeepSeek model. Raises ModelConfigError."""
    # The norms of the compressed vectors take transformers' default there, whatever rms_norm_eps is.
    require(raw, {"rms_norm_eps": 1e-6, "rope_interleave": True})
    heads = positive(raw, "num_attention_heads")
    require(raw, {"num_key_value_heads": heads})
    require(raw, {"head_dim": raw.get("qk_rope_head_dim")})
    if positive(raw, "qk_rope_head_dim") % 2:
        raise ModelConfigError(f"qk_rope_head_dim={raw['qk_rope_head_dim']} is rotated in pairs; it must be even")
    return MLAConfig(
        q_lora_rank=optional(raw, "q_lora_rank", 1536),
        kv_lora_rank=positive(raw, "kv_lora_rank"),
        qk_nope_head_dim=positive(raw, "qk_nope_head_dim"),
        qk_rope_head_dim=positive(raw, "qk_rope_head_dim"),
        v_head_dim=positive(raw, "v_head_dim"),
    )
