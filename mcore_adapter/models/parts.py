"""Parts that layers are made of: which Hugging Face tensors each Megatron parameter consists of, with their shapes.

Invariant: the tensors of a part's shapes are exactly those that its table names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_adapter.models.conversions import (
    Conversion,
    MergeGateUp,
    MergeQKV,
    OfExpert,
    Replicated,
    Split,
    SplitGateUp,
)
from model_specs.config import ModelConfig
from model_specs.moe import MLAConfig, MoEConfig

CORRECTION_BIAS = "e_score_correction_bias"
"""Ends the name of the one kind of tensor that is float32 in every checkpoint."""

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Part:
    """Some parameters of a layer."""

    table: Mapping[str, Conversion]
    """Parameter name inside a layer -> conversion."""
    shapes: Mapping[str, tuple[int, ...]]
    """Hugging Face name -> shape, in the order of the network."""

    def __or__(self, other: Part) -> Part:
        return Part({**self.table, **other.table}, {**self.shapes, **other.shapes})


def layer_prefix(layer: int) -> str:
    """Return the prefix of the Hugging Face names of layer `layer` (from 0, over the whole model)."""
    return f"model.layers.{layer}."


def norm(ours: str, theirs: str, size: int) -> Part:
    """Return a norm, the same on every rank."""
    return Part({f"{ours}.weight": Replicated(f"{theirs}.weight")}, {f"{theirs}.weight": (size,)})


def input_norm(config: ModelConfig, hf: str) -> Part:
    return norm("input_layernorm", f"{hf}input_layernorm", config.hidden_size)


def mlp_norm(config: ModelConfig, hf: str) -> Part:
    """Return the norm before the MLP, which Hugging Face names for the attention before it."""
    return norm("pre_mlp_layernorm", f"{hf}post_attention_layernorm", config.hidden_size)


def attention(config: ModelConfig, hf: str) -> Part:
    """Return plain attention, with the biases and norms that `config` has."""

    def qkv(kind: str) -> MergeQKV:
        q, k, v = (f"{hf}self_attn.{x}_proj.{kind}" for x in "qkv")
        return MergeQKV(q, k, v, num_kv_heads=config.num_kv_heads)

    table: dict[str, Conversion] = {"self_attention.linear_qkv.weight": qkv("weight")}
    if config.qkv_bias:
        table["self_attention.linear_qkv.bias"] = qkv("bias")
    if config.qk_norm:
        table["self_attention.q_layernorm.weight"] = Replicated(f"{hf}self_attn.q_norm.weight")
        table["self_attention.k_layernorm.weight"] = Replicated(f"{hf}self_attn.k_norm.weight")
    table["self_attention.linear_proj.weight"] = Split(f"{hf}self_attn.o_proj.weight", 1)
    e, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {}
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        shapes[f"{hf}self_attn.{name}_proj.weight"] = (rows, e)
        if config.qkv_bias:
            shapes[f"{hf}self_attn.{name}_proj.bias"] = (rows,)
        if config.qk_norm and name != "v":
            shapes[f"{hf}self_attn.{name}_norm.weight"] = (config.head_dim,)
    shapes[f"{hf}self_attn.o_proj.weight"] = (e, q)
    return Part(table, shapes)


def latent_attention(config: ModelConfig, mla: MLAConfig, hf: str) -> Part:
    """Return latent attention: projections down are whole on every tensor-parallel rank, those up are split by
    heads."""
    ours, theirs = "self_attention.", f"{hf}self_attn."
    e, heads = config.hidden_size, config.num_heads
    table: dict[str, Conversion] = {}
    shapes: Shapes = {}
    if mla.q_lora_rank is None:
        table[f"{ours}linear_q_proj.weight"] = Split(f"{theirs}q_proj.weight", 0)
        shapes[f"{theirs}q_proj.weight"] = (heads * mla.qk_head_dim, e)
    else:
        table[f"{ours}linear_q_down_proj.weight"] = Replicated(f"{theirs}q_a_proj.weight")
        table[f"{ours}q_layernorm.weight"] = Replicated(f"{theirs}q_a_layernorm.weight")
        table[f"{ours}linear_q_up_proj.weight"] = Split(f"{theirs}q_b_proj.weight", 0)
        shapes[f"{theirs}q_a_proj.weight"] = (mla.q_lora_rank, e)
        shapes[f"{theirs}q_a_layernorm.weight"] = (mla.q_lora_rank,)
        shapes[f"{theirs}q_b_proj.weight"] = (heads * mla.qk_head_dim, mla.q_lora_rank)
    table[f"{ours}linear_kv_down_proj.weight"] = Replicated(f"{theirs}kv_a_proj_with_mqa.weight")
    table[f"{ours}kv_layernorm.weight"] = Replicated(f"{theirs}kv_a_layernorm.weight")
    table[f"{ours}linear_kv_up_proj.weight"] = Split(f"{theirs}kv_b_proj.weight", 0)
    table[f"{ours}linear_proj.weight"] = Split(f"{theirs}o_proj.weight", 1)
    shapes[f"{theirs}kv_a_proj_with_mqa.weight"] = (mla.kv_lora_rank + mla.qk_rope_head_dim, e)
    shapes[f"{theirs}kv_a_layernorm.weight"] = (mla.kv_lora_rank,)
    shapes[f"{theirs}kv_b_proj.weight"] = (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    shapes[f"{theirs}o_proj.weight"] = (e, heads * mla.v_head_dim)
    return Part(table, shapes)


def gated_mlp(ours: str, theirs: str, hidden: int, width: int) -> Part:
    gate, up, down = (f"{theirs}{name}_proj.weight" for name in ("gate", "up", "down"))
    table: dict[str, Conversion] = {f"{ours}linear_fc1.weight": MergeGateUp(gate, up)}
    table[f"{ours}linear_fc2.weight"] = Split(down, 1)
    return Part(table, {gate: (width, hidden), up: (width, hidden), down: (hidden, width)})


def fused_gated_mlp(ours: str, theirs: str, hidden: int, width: int) -> Part:
    """Return a gated MLP whose checkpoint has the gate and up projections in one tensor."""
    gate_up, down = f"{theirs}gate_up_proj.weight", f"{theirs}down_proj.weight"
    table: dict[str, Conversion] = {f"{ours}linear_fc1.weight": SplitGateUp(gate_up)}
    table[f"{ours}linear_fc2.weight"] = Split(down, 1)
    return Part(table, {gate_up: (2 * width, hidden), down: (hidden, width)})


def dense_mlp(config: ModelConfig, hf: str) -> Part:
    return gated_mlp("mlp.", f"{hf}mlp.", config.hidden_size, config.intermediate_size)


def experts(config: ModelConfig, moe: MoEConfig, hf: str) -> Part:
    """Return a router with its experts, also those that every token passes through."""
    hidden, gate = config.hidden_size, f"{hf}mlp.gate."
    part = Part({"mlp.router.weight": Replicated(f"{gate}weight")}, {f"{gate}weight": (moe.num_experts, hidden)})
    if moe.correction_bias:
        bias = f"{gate}{CORRECTION_BIAS}"
        part |= Part({"mlp.router.expert_bias": Replicated(bias)}, {bias: (moe.num_experts,)})
    table: dict[str, Conversion] = {}
    shapes: Shapes = {}
    for i in range(moe.num_experts):
        ours = f"mlp.experts.local_experts.{i}."
        gate_, up, down = (f"{hf}mlp.experts.{i}.{name}_proj.weight" for name in ("gate", "up", "down"))
        table[f"{ours}linear_fc1.weight"] = OfExpert(i, MergeGateUp(gate_, up))
        table[f"{ours}linear_fc2.weight"] = OfExpert(i, Replicated(down))
        shapes |= {gate_: (moe.intermediate_size, hidden), up: (moe.intermediate_size, hidden)}
        shapes[down] = (hidden, moe.intermediate_size)
    part |= Part(table, shapes)
    if moe.shared_intermediate_size:
        part |= gated_mlp("mlp.shared_experts.", f"{hf}mlp.shared_experts.", hidden, moe.shared_intermediate_size)
    return part
