"""Every tensor of a model's Hugging Face checkpoint, with its shape: what the dry run, the loader and the converter
compare folders with, and what an export writes.

A family's table of server parts maps the name of a module ("q_proj" of "model.layers.0.self_attn.q_proj.weight") to its
place in an inference server (SGLang). What no table names is held whole under its own name by every tensor-parallel
rank. Experts are the same in every family: gate and up projections of all experts lie in `w13_weight`, the down
projections in `w2_weight`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from model_specs.config import MLAConfig, ModelConfig, MoEConfig


@dataclass(frozen=True)
class Heads:
    """Whole heads of a rank, in `into`: its query heads, then its keys, then its values. Ranks share a key/value head
    where there are fewer heads than ranks."""

    kind: Literal["query", "key", "value"]
    into: str = "qkv_proj"


@dataclass(frozen=True)
class Rows:
    """The tensor's `pieces` equal blocks of rows, each cut over the ranks, as the pieces `first` and following of
    `into`."""

    into: str
    first: int = 0
    pieces: int = 1


@dataclass(frozen=True)
class WholeRows:
    """Whole on every rank, as the rows of `into` from `first_row` on."""

    into: str
    first_row: int = 0


@dataclass(frozen=True)
class Columns:
    """Cut along its second dimension."""


@dataclass(frozen=True)
class Vocabulary:
    """Rows cut over the ranks, after the vocabulary has been padded."""


Place = Heads | Rows | WholeRows | Columns | Vocabulary
ServerParts = Mapping[str, Place]

DECODER: ServerParts = {
    "q_proj": Heads("query"),
    "k_proj": Heads("key"),
    "v_proj": Heads("value"),
    "o_proj": Columns(),
    "gate_proj": Rows("gate_up_proj", first=0),
    "up_proj": Rows("gate_up_proj", first=1),
    "down_proj": Columns(),
    "embed_tokens": Vocabulary(),
    "lm_head": Vocabulary(),
}
"""Decoders with plain attention and gated MLPs."""


EMBEDDING, OUTPUT, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
VALUE_HEAD = "score.weight"
"""The value head of a critic."""
CORRECTION_BIAS = "e_score_correction_bias"
"""Ends the name of the one kind of tensor that is float32 in every checkpoint."""

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]


def hf_shapes(config: ModelConfig, *, is_critic: bool) -> dict[str, Shape]:
    """Return the tensors of the whole model by name, in the order of the network."""
    return dict(iter_shapes(config, is_critic=is_critic))


def iter_shapes(config: ModelConfig, *, is_critic: bool) -> Named:
    """Yield the tensors of hf_shapes() one by one."""
    yield EMBEDDING, (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        yield from _layer(config, layer)
    yield FINAL_NORM, (config.hidden_size,)
    if is_critic:
        yield VALUE_HEAD, (1, config.hidden_size)
    elif not config.tied:
        yield OUTPUT, (config.vocab_size, config.hidden_size)


def layer_prefix(layer: int) -> str:
    """Return the prefix of the names of layer `layer` (from 0, over the whole model)."""
    return f"model.layers.{layer}."


def _layer(config: ModelConfig, layer: int) -> Named:
    prefix, hidden = layer_prefix(layer), (config.hidden_size,)
    yield f"{prefix}input_layernorm.weight", hidden
    attention = f"{prefix}self_attn."
    yield from _attention(config, attention) if config.mla is None else _latent_attention(config, config.mla, attention)
    if config.post_norms:
        yield f"{prefix}post_self_attn_layernorm.weight", hidden
    yield f"{prefix}post_attention_layernorm.weight", hidden
    if config.moe is not None and config.moe.sparse_layers[layer]:
        yield from _experts(config, config.moe, f"{prefix}mlp.")
    else:
        yield from _mlp(config, f"{prefix}mlp.", config.intermediate_size)
    if config.post_norms:
        yield f"{prefix}post_mlp_layernorm.weight", hidden


def _attention(config: ModelConfig, prefix: str) -> Named:
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    for name, count in heads.items():
        rows = count * config.head_dim
        yield f"{prefix}{name}_proj.weight", (rows, config.hidden_size)
        if config.qkv_bias:
            yield f"{prefix}{name}_proj.bias", (rows,)
        if config.qk_norm and name != "v":
            yield f"{prefix}{name}_norm.weight", (config.head_dim,)
    yield f"{prefix}o_proj.weight", (config.hidden_size, config.num_heads * config.head_dim)


def _latent_attention(config: ModelConfig, mla: MLAConfig, prefix: str) -> Named:
    hidden, heads = config.hidden_size, config.num_heads
    if mla.q_lora_rank is None:
        yield f"{prefix}q_proj.weight", (heads * mla.qk_head_dim, hidden)
    else:
        yield f"{prefix}q_a_proj.weight", (mla.q_lora_rank, hidden)
        yield f"{prefix}q_a_layernorm.weight", (mla.q_lora_rank,)
        yield f"{prefix}q_b_proj.weight", (heads * mla.qk_head_dim, mla.q_lora_rank)
    yield f"{prefix}kv_a_proj_with_mqa.weight", (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden)
    yield f"{prefix}kv_a_layernorm.weight", (mla.kv_lora_rank,)
    yield f"{prefix}kv_b_proj.weight", (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    yield f"{prefix}o_proj.weight", (hidden, heads * mla.v_head_dim)


def _mlp(config: ModelConfig, prefix: str, width: int) -> Named:
    """Yield a gated MLP; where `fused_gate_up`, gate and up are one tensor."""
    if config.fused_gate_up:
        yield f"{prefix}gate_up_proj.weight", (2 * width, config.hidden_size)
    else:
        yield f"{prefix}gate_proj.weight", (width, config.hidden_size)
        yield f"{prefix}up_proj.weight", (width, config.hidden_size)
    yield f"{prefix}down_proj.weight", (config.hidden_size, width)


def _experts(config: ModelConfig, moe: MoEConfig, prefix: str) -> Named:
    """Yield a router with its experts, also those that every token passes through."""
    yield f"{prefix}gate.weight", (moe.num_experts, config.hidden_size)
    if moe.correction_bias:
        yield f"{prefix}gate.{CORRECTION_BIAS}", (moe.num_experts,)
    for expert in range(moe.num_experts):
        yield from _mlp(config, f"{prefix}experts.{expert}.", moe.intermediate_size)
    if moe.shared_intermediate_size:
        yield from _mlp(config, f"{prefix}shared_experts.", moe.shared_intermediate_size)
