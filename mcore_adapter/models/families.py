"""Hugging Face <-> Megatron, as tables: which Hugging Face tensors each Megatron parameter is made of.

A layer is an attention (plain or latent) and an MLP (dense or with experts); each contributes its own table and shapes.
Invariant: over all ranks the pieces of a parameter cover each of its Hugging Face tensors exactly once (replicated
ones: on each rank whole), so the round trip is the identity.
"""

from __future__ import annotations

import re

from torch import Tensor

from mcore_adapter.models.conversions import Conversion, MergeGateUp, MergeQKV, OfExpert, Replicated, Split
from model_specs.hf_config import ModelConfig
from model_specs.moe import MLAConfig, MoEConfig

# Megatron's TransformerEngine layers keep a norm inside the linear layer after it: the same parameter by another name.
_OTHER_SPELLINGS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
# Its experts lie in one grouped layer, with a weight for each.
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")
# Ours on GPUs have one weight for all of them.
_STACKED = {"mlp.experts.gate_up": "linear_fc1", "mlp.experts.down": "linear_fc2"}
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.*)")

EMBEDDING, FINAL_NORM, OUTPUT = (
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
)
HF_EMBEDDING, HF_VALUE_HEAD = "model.embed_tokens.weight", "score.weight"
CORRECTION_BIAS = "e_score_correction_bias"
"""Ends the name of the one kind of tensor that is float32 in every checkpoint."""

Shapes = dict[str, tuple[int, ...]]


def canonical_name(name: str, first_expert: int = 0) -> str:
    """A parameter of a layer ("input_layernorm.weight", ...) in the spelling that the tables use, where experts are
    counted over the whole model. first_expert: the first one that this rank holds."""
    name = _GROUPED_EXPERT.sub(r"mlp.experts.local_experts.\2.\1.weight", _OTHER_SPELLINGS.get(name, name))
    if expert := _EXPERT.fullmatch(name):
        return f"mlp.experts.local_experts.{first_expert + int(expert[1])}.{expert[2]}"
    return name


def unstacked(name: str, param: Tensor) -> list[tuple[str, Tensor]]:
    """A parameter of a layer -> itself, or each expert's part of it, in spellings for canonical_name()."""
    if name not in _STACKED:
        return [(name, param)]
    return [(f"mlp.experts.{_STACKED[name]}.weight{i}", part) for i, part in enumerate(param.detach())]


def layer_table(config: ModelConfig, layer: int) -> dict[str, Conversion]:
    """Parameter name inside a layer -> conversion, for layer `layer` (from 0, over the whole model)."""
    hf = f"model.layers.{layer}."
    table: dict[str, Conversion] = {"input_layernorm.weight": Replicated(f"{hf}input_layernorm.weight")}
    table |= _latent_attention(config.mla, hf) if config.mla else _attention(config, hf)
    table["self_attention.linear_proj.weight"] = Split(f"{hf}self_attn.o_proj.weight", 1)
    table["pre_mlp_layernorm.weight"] = Replicated(f"{hf}post_attention_layernorm.weight")
    has_experts = config.moe is not None and config.moe.sparse_layers[layer]
    return table | (_experts(config.moe, hf) if config.moe and has_experts else _mlp("mlp.", f"{hf}mlp."))


def _attention(config: ModelConfig, hf: str) -> dict[str, Conversion]:
    def qkv(kind: str) -> MergeQKV:
        q, k, v = (f"{hf}self_attn.{x}_proj.{kind}" for x in "qkv")
        return MergeQKV(q, k, v, num_kv_heads=config.num_kv_heads)

    table: dict[str, Conversion] = {"self_attention.linear_qkv.weight": qkv("weight")}
    if config.qkv_bias:
        table["self_attention.linear_qkv.bias"] = qkv("bias")
    if config.qk_norm:
        table["self_attention.q_layernorm.weight"] = Replicated(f"{hf}self_attn.q_norm.weight")
        table["self_attention.k_layernorm.weight"] = Replicated(f"{hf}self_attn.k_norm.weight")
    return table


def _latent_attention(mla: MLAConfig, hf: str) -> dict[str, Conversion]:
    """The projections down are whole on every tensor-parallel rank; those up are split by heads."""
    table: dict[str, Conversion] = {}
    if mla.q_lora_rank is None:
        table["self_attention.linear_q_proj.weight"] = Split(f"{hf}self_attn.q_proj.weight", 0)
    else:
        table["self_attention.linear_q_down_proj.weight"] = Replicated(f"{hf}self_attn.q_a_proj.weight")
        table["self_attention.q_layernorm.weight"] = Replicated(f"{hf}self_attn.q_a_layernorm.weight")
        table["self_attention.linear_q_up_proj.weight"] = Split(f"{hf}self_attn.q_b_proj.weight", 0)
    table["self_attention.linear_kv_down_proj.weight"] = Replicated(f"{hf}self_attn.kv_a_proj_with_mqa.weight")
    table["self_attention.kv_layernorm.weight"] = Replicated(f"{hf}self_attn.kv_a_layernorm.weight")
    table["self_attention.linear_kv_up_proj.weight"] = Split(f"{hf}self_attn.kv_b_proj.weight", 0)
    return table


def _mlp(megatron: str, hf: str) -> dict[str, Conversion]:
    return {
        f"{megatron}linear_fc1.weight": MergeGateUp(f"{hf}gate_proj.weight", f"{hf}up_proj.weight"),
        f"{megatron}linear_fc2.weight": Split(f"{hf}down_proj.weight", 1),
    }


def _experts(moe: MoEConfig, hf: str) -> dict[str, Conversion]:
    table: dict[str, Conversion] = {"mlp.router.weight": Replicated(f"{hf}mlp.gate.weight")}
    if moe.correction_bias:
        table["mlp.router.expert_bias"] = Replicated(f"{hf}mlp.gate.{CORRECTION_BIAS}")
    for i in range(moe.num_experts):
        ours, theirs = f"mlp.experts.local_experts.{i}.", f"{hf}mlp.experts.{i}."
        gate_up = MergeGateUp(f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight")
        table[f"{ours}linear_fc1.weight"] = OfExpert(i, gate_up)
        table[f"{ours}linear_fc2.weight"] = OfExpert(i, Replicated(f"{theirs}down_proj.weight"))
    if moe.shared_intermediate_size:
        table |= _mlp("mlp.shared_experts.", f"{hf}mlp.shared_experts.")
    return table


def outer_table(config: ModelConfig, *, is_critic: bool) -> dict[str, Conversion]:
    """Parameter name -> conversion, for what lies outside the layers, without a tied output layer."""
    table: dict[str, Conversion] = {
        EMBEDDING: Split(HF_EMBEDDING, 0),
        FINAL_NORM: Replicated("model.norm.weight"),
    }
    if is_critic:
        table[OUTPUT] = Replicated(HF_VALUE_HEAD)
    elif not config.tied:
        table[OUTPUT] = Split("lm_head.weight", 0)
    return table


def hf_shapes(config: ModelConfig, *, is_critic: bool) -> Shapes:
    """Every tensor of the Hugging Face checkpoint, in the order of the network, with its shape."""
    e, v = config.hidden_size, config.vocab_size
    shapes: Shapes = {HF_EMBEDDING: (v, e)}
    for layer in range(config.num_layers):
        hf = f"model.layers.{layer}."
        shapes[f"{hf}input_layernorm.weight"] = (e,)
        shapes |= _latent_attention_shapes(config, config.mla, hf) if config.mla else _attention_shapes(config, hf)
        shapes[f"{hf}post_attention_layernorm.weight"] = (e,)
        if config.moe and config.moe.sparse_layers[layer]:
            shapes |= _expert_shapes(config.moe, e, hf)
        else:
            shapes |= _mlp_shapes(f"{hf}mlp.", e, config.intermediate_size)
    shapes["model.norm.weight"] = (e,)
    if is_critic:
        shapes[HF_VALUE_HEAD] = (1, e)
    elif not config.tied:
        shapes["lm_head.weight"] = (v, e)
    return shapes


def _attention_shapes(config: ModelConfig, hf: str) -> Shapes:
    e, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {}
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        shapes[f"{hf}self_attn.{name}_proj.weight"] = (rows, e)
        if config.qkv_bias:
            shapes[f"{hf}self_attn.{name}_proj.bias"] = (rows,)
        if config.qk_norm and name != "v":
            shapes[f"{hf}self_attn.{name}_norm.weight"] = (config.head_dim,)
    shapes[f"{hf}self_attn.o_proj.weight"] = (e, q)
    return shapes


def _latent_attention_shapes(config: ModelConfig, mla: MLAConfig, hf: str) -> Shapes:
    e, heads = config.hidden_size, config.num_heads
    attention = f"{hf}self_attn."
    shapes: Shapes = {}
    if mla.q_lora_rank is None:
        shapes[f"{attention}q_proj.weight"] = (heads * mla.qk_head_dim, e)
    else:
        shapes[f"{attention}q_a_proj.weight"] = (mla.q_lora_rank, e)
        shapes[f"{attention}q_a_layernorm.weight"] = (mla.q_lora_rank,)
        shapes[f"{attention}q_b_proj.weight"] = (heads * mla.qk_head_dim, mla.q_lora_rank)
    shapes[f"{attention}kv_a_proj_with_mqa.weight"] = (mla.kv_lora_rank + mla.qk_rope_head_dim, e)
    shapes[f"{attention}kv_a_layernorm.weight"] = (mla.kv_lora_rank,)
    shapes[f"{attention}kv_b_proj.weight"] = (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    shapes[f"{attention}o_proj.weight"] = (e, heads * mla.v_head_dim)
    return shapes


def _mlp_shapes(mlp: str, hidden: int, width: int) -> Shapes:
    shapes: Shapes = dict.fromkeys((f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"), (width, hidden))
    return {**shapes, f"{mlp}down_proj.weight": (hidden, width)}


def _expert_shapes(moe: MoEConfig, hidden: int, hf: str) -> Shapes:
    shapes: Shapes = {f"{hf}mlp.gate.weight": (moe.num_experts, hidden)}
    if moe.correction_bias:
        shapes[f"{hf}mlp.gate.{CORRECTION_BIAS}"] = (moe.num_experts,)
    for i in range(moe.num_experts):
        shapes |= _mlp_shapes(f"{hf}mlp.experts.{i}.", hidden, moe.intermediate_size)
    if moe.shared_intermediate_size:
        shapes |= _mlp_shapes(f"{hf}mlp.shared_experts.", hidden, moe.shared_intermediate_size)
    return shapes
