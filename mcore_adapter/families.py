"""Hugging Face <-> Megatron, as a table: which Hugging Face rows (or columns) each Megatron parameter is made of.

One description serves both directions. A `Conversion` lists, for a tensor-parallel rank, the pieces of Hugging Face
tensors that lie one after the other in its Megatron parameter; loading copies pieces in, exporting copies them out.
Invariant: over all ranks of a tensor-parallel group the pieces of a parameter cover each of its Hugging Face tensors
exactly once (replicated ones: on each rank whole), so the round trip is the identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from mcore_adapter.hf_config import ModelConfig, ModelConfigError


@dataclass(frozen=True)
class Piece:
    """Rows (dim 0) or columns (dim 1) [start, stop) of the Hugging Face tensor `name`."""

    name: str
    start: int
    stop: int


class Conversion(Protocol):
    """How one Megatron parameter relates to its Hugging Face tensors."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its Hugging Face tensors."""
        ...

    @property
    def tp_dim(self) -> int | None:
        """Dimension that tensor parallelism splits; None: replicated."""
        ...

    def pieces(self, sizes: Mapping[str, int], *, rank: int, tp: int) -> tuple[Piece, ...]:
        """What the shard of tensor-parallel rank `rank` of `tp` is made of, in order along tp_dim (dim 0 when
        replicated). sizes: length of that dimension of every Hugging Face tensor."""
        ...


@dataclass(frozen=True)
class Replicated:
    """name [...] <-> the same tensor on every rank."""

    name: str
    tp_dim: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def pieces(self, sizes: Mapping[str, int], *, rank: int, tp: int) -> tuple[Piece, ...]:
        return (Piece(self.name, 0, sizes[self.name]),)


@dataclass(frozen=True)
class Split:
    """name [a, b] <-> [a / tp, b] (tp_dim 0) or [a, b / tp] (tp_dim 1)."""

    name: str
    tp_dim: int

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def pieces(self, sizes: Mapping[str, int], *, rank: int, tp: int) -> tuple[Piece, ...]:
        share = _divide(self.name, sizes[self.name], tp)
        return (Piece(self.name, rank * share, (rank + 1) * share),)


@dataclass(frozen=True)
class MergeGateUp:
    """gate [F, E], up [F, E] <-> linear_fc1 [2 * F / tp, E]: this rank's rows of gate, then of up."""

    gate: str
    up: str
    tp_dim: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return (self.gate, self.up)

    def pieces(self, sizes: Mapping[str, int], *, rank: int, tp: int) -> tuple[Piece, ...]:
        share = _divide(self.gate, sizes[self.gate], tp)
        return tuple(Piece(name, rank * share, (rank + 1) * share) for name in self.names)


@dataclass(frozen=True)
class MergeQKV:
    """q [H*D, E], k [G*D, E], v [G*D, E] <-> linear_qkv [G*(H/G+2)*D / tp, E]: for every key/value head its
    query heads, its key and its value. Biases the same without E."""

    q: str
    k: str
    v: str
    num_kv_heads: int
    tp_dim: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return (self.q, self.k, self.v)

    def pieces(self, sizes: Mapping[str, int], *, rank: int, tp: int) -> tuple[Piece, ...]:
        groups = _divide("num_key_value_heads", self.num_kv_heads, tp)
        per_group = {name: sizes[name] // self.num_kv_heads for name in self.names}
        return tuple(
            Piece(name, group * per_group[name], (group + 1) * per_group[name])
            for group in range(rank * groups, (rank + 1) * groups)
            for name in self.names
        )


def _divide(what: str, size: int, tp: int) -> int:
    if size % tp:
        raise ModelConfigError(f"{what}: size {size} must be divisible by tensor parallel size {tp}")
    return size // tp


# Megatron's TransformerEngine layers keep a norm inside the linear layer after it: the same parameter by another name.
_OTHER_SPELLINGS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}

EMBEDDING, FINAL_NORM, OUTPUT = (
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
)
HF_EMBEDDING, HF_VALUE_HEAD = "model.embed_tokens.weight", "score.weight"


def canonical_name(name: str) -> str:
    """A parameter of a layer ("input_layernorm.weight", ...) in the spelling that the tables use."""
    return _OTHER_SPELLINGS.get(name, name)


def layer_table(config: ModelConfig, layer: int) -> dict[str, Conversion]:
    """Parameter name inside a layer -> conversion, for layer `layer` (from 0, over the whole model)."""
    hf = f"model.layers.{layer}."

    def qkv(kind: str) -> MergeQKV:
        q, k, v = (f"{hf}self_attn.{x}_proj.{kind}" for x in "qkv")
        return MergeQKV(q, k, v, num_kv_heads=config.num_kv_heads)

    table: dict[str, Conversion] = {
        "input_layernorm.weight": Replicated(f"{hf}input_layernorm.weight"),
        "self_attention.linear_qkv.weight": qkv("weight"),
        "self_attention.linear_proj.weight": Split(f"{hf}self_attn.o_proj.weight", 1),
        "pre_mlp_layernorm.weight": Replicated(f"{hf}post_attention_layernorm.weight"),
        "mlp.linear_fc1.weight": MergeGateUp(f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight"),
        "mlp.linear_fc2.weight": Split(f"{hf}mlp.down_proj.weight", 1),
    }
    if config.qkv_bias:
        table["self_attention.linear_qkv.bias"] = qkv("bias")
    if config.qk_norm:
        table["self_attention.q_layernorm.weight"] = Replicated(f"{hf}self_attn.q_norm.weight")
        table["self_attention.k_layernorm.weight"] = Replicated(f"{hf}self_attn.k_norm.weight")
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


def hf_shapes(config: ModelConfig, *, is_critic: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face checkpoint, in the order of the network, with its shape."""
    e, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {HF_EMBEDDING: (v, e)}
    for layer in range(config.num_layers):
        hf = f"model.layers.{layer}."
        shapes[f"{hf}input_layernorm.weight"] = (e,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{hf}self_attn.{name}_proj.weight"] = (rows, e)
            if config.qkv_bias:
                shapes[f"{hf}self_attn.{name}_proj.bias"] = (rows,)
            if config.qk_norm and name != "v":
                shapes[f"{hf}self_attn.{name}_norm.weight"] = (config.head_dim,)
        shapes[f"{hf}self_attn.o_proj.weight"] = (e, q)
        shapes[f"{hf}post_attention_layernorm.weight"] = (e,)
        shapes[f"{hf}mlp.gate_proj.weight"] = shapes[f"{hf}mlp.up_proj.weight"] = (f, e)
        shapes[f"{hf}mlp.down_proj.weight"] = (e, f)
    shapes["model.norm.weight"] = (e,)
    if is_critic:
        shapes[HF_VALUE_HEAD] = (1, e)
    elif not config.tied:
        shapes["lm_head.weight"] = (v, e)
    return shapes
