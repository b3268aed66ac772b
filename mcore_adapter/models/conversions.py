"""Which Hugging Face tensors each Megatron parameter consists of, for every model that config.json can describe.

One description serves both directions. A `Conversion` lists, for a tensor-parallel rank, the pieces of Hugging Face
tensors that lie one after the other in its Megatron parameter; loading copies pieces in, exporting copies them out.
Invariant: over all ranks of a tensor-parallel group the pieces of a parameter cover each of its Hugging Face tensors
exactly once (replicated ones: on each rank whole), so the round trip is the identity. The tables of a model name
exactly the tensors of model_specs/tensors.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model_specs import tensors
from model_specs.config import MLAConfig, ModelConfig, MoEConfig
from model_specs.untrusted import ModelConfigError


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
        """Return the pieces of the shard of tensor-parallel rank `rank` of `tp`, in order along tp_dim (dim 0 when
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
class SplitGateUp:
    """gate_up [2 * F, E], gate before up <-> linear_fc1 [2 * F / tp, E]: this rank's rows of gate, then of up."""

    name: str
    tp_dim: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def pieces(self, sizes: Mapping[str, int], *, rank: int, tp: int) -> tuple[Piece, ...]:
        width = _divide(self.name, sizes[self.name], 2)
        share = _divide(self.name, width, tp)
        starts = (rank * share, width + rank * share)
        return tuple(Piece(self.name, start, start + share) for start in starts)


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


@dataclass(frozen=True)
class OfExpert:
    """The parameter `inner` of expert `expert`, whole on each rank that holds the expert."""

    expert: int
    inner: Conversion
    tp_dim: None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.inner.names

    def pieces(self, sizes: Mapping[str, int], *, rank: int, tp: int) -> tuple[Piece, ...]:
        return self.inner.pieces(sizes, rank=0, tp=1)


def _divide(what: str, size: int, tp: int) -> int:
    if size % tp:
        raise ModelConfigError(f"{what}: size {size} must be divisible by tensor parallel size {tp}")
    return size // tp


Part = dict[str, Conversion]
"""Some parameters of a layer: name inside the layer -> conversion."""
EMBEDDING, FINAL_NORM, OUTPUT = (
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
)
"""Megatron's names outside the layers."""

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


def canonical_name(name: str, first_expert: int = 0) -> str:
    """Return a parameter of a layer ("input_layernorm.weight", ...) in the spelling that the tables use, where experts
    are counted over the whole model. first_expert: the first one that this rank holds."""
    name = _GROUPED_EXPERT.sub(r"mlp.experts.local_experts.\2.\1.weight", _OTHER_SPELLINGS.get(name, name))
    if expert := _EXPERT.fullmatch(name):
        return f"mlp.experts.local_experts.{first_expert + int(expert[1])}.{expert[2]}"
    return name


def unstacked(name: str, param: Tensor) -> list[tuple[str, Tensor]]:
    """Return a parameter of a layer -> itself, or each expert's part of it, in spellings for canonical_name()."""
    if name not in _STACKED:
        return [(name, param)]
    return [(f"mlp.experts.{_STACKED[name]}.weight{i}", part) for i, part in enumerate(param.detach())]


def outer_table(config: ModelConfig, *, is_critic: bool) -> dict[str, Conversion]:
    """Return parameter name -> conversion, for the parameters outside the layers, without a tied output layer."""
    table: dict[str, Conversion] = {EMBEDDING: Split(tensors.EMBEDDING, 0), FINAL_NORM: Replicated(tensors.FINAL_NORM)}
    if is_critic:
        table[OUTPUT] = Replicated(tensors.VALUE_HEAD)
    elif not config.tied:
        table[OUTPUT] = Split(tensors.OUTPUT, 0)
    return table


def layer_table(config: ModelConfig, layer: int) -> Part:
    """Return layer number `layer` (from 0, over the whole model) with what `config` has: plain or latent attention,
    norms after attention and MLP, a dense MLP or experts."""
    hf = tensors.layer_prefix(layer)
    table = _norm("input_layernorm", f"{hf}input_layernorm")
    table |= _attention(config, hf) if config.mla is None else _latent_attention(config.mla, hf)
    if config.post_norms:
        table |= _norm("post_self_attn_layernorm", f"{hf}post_self_attn_layernorm")
    # Hugging Face names the norm before the MLP for the attention before it.
    table |= _norm("pre_mlp_layernorm", f"{hf}post_attention_layernorm")
    if config.moe is not None and config.moe.sparse_layers[layer]:
        table |= _experts(config, config.moe, f"{hf}mlp.")
    else:
        table |= _gated_mlp(config, f"{hf}mlp.")
    if config.post_norms:
        table |= _norm("post_mlp_layernorm", f"{hf}post_mlp_layernorm")
    return table


def _norm(ours: str, theirs: str) -> Part:
    """Return a norm, the same on every rank."""
    return {f"{ours}.weight": Replicated(f"{theirs}.weight")}


def _attention(config: ModelConfig, hf: str) -> Part:
    """Return plain attention, with the biases and norms that `config` has."""

    def qkv(kind: str) -> MergeQKV:
        q, k, v = (f"{hf}self_attn.{x}_proj.{kind}" for x in "qkv")
        return MergeQKV(q, k, v, num_kv_heads=config.num_kv_heads)

    table: Part = {"self_attention.linear_qkv.weight": qkv("weight")}
    if config.qkv_bias:
        table["self_attention.linear_qkv.bias"] = qkv("bias")
    if config.qk_norm:
        table["self_attention.q_layernorm.weight"] = Replicated(f"{hf}self_attn.q_norm.weight")
        table["self_attention.k_layernorm.weight"] = Replicated(f"{hf}self_attn.k_norm.weight")
    return table | {"self_attention.linear_proj.weight": Split(f"{hf}self_attn.o_proj.weight", 1)}


def _latent_attention(mla: MLAConfig, hf: str) -> Part:
    """Return latent attention: projections down are whole on every tensor-parallel rank, those up are split by
    heads."""
    ours, theirs = "self_attention.", f"{hf}self_attn."
    table: Part = {}
    if mla.q_lora_rank is None:
        table[f"{ours}linear_q_proj.weight"] = Split(f"{theirs}q_proj.weight", 0)
    else:
        table[f"{ours}linear_q_down_proj.weight"] = Replicated(f"{theirs}q_a_proj.weight")
        table[f"{ours}q_layernorm.weight"] = Replicated(f"{theirs}q_a_layernorm.weight")
        table[f"{ours}linear_q_up_proj.weight"] = Split(f"{theirs}q_b_proj.weight", 0)
    table[f"{ours}linear_kv_down_proj.weight"] = Replicated(f"{theirs}kv_a_proj_with_mqa.weight")
    table[f"{ours}kv_layernorm.weight"] = Replicated(f"{theirs}kv_a_layernorm.weight")
    table[f"{ours}linear_kv_up_proj.weight"] = Split(f"{theirs}kv_b_proj.weight", 0)
    return table | {f"{ours}linear_proj.weight": Split(f"{theirs}o_proj.weight", 1)}


def _gated_mlp(config: ModelConfig, hf: str, ours: str = "mlp.") -> Part:
    """Return a gated MLP; the checkpoint may have the gate and up projections in one tensor."""
    gate, up, down = (f"{hf}{name}_proj.weight" for name in ("gate", "up", "down"))
    first: Conversion = SplitGateUp(f"{hf}gate_up_proj.weight") if config.fused_gate_up else MergeGateUp(gate, up)
    return {f"{ours}linear_fc1.weight": first, f"{ours}linear_fc2.weight": Split(down, 1)}


def _experts(config: ModelConfig, moe: MoEConfig, hf: str) -> Part:
    """Return a router with its experts, also those that every token passes through. `hf`: of the MLP."""
    table: Part = {"mlp.router.weight": Replicated(f"{hf}gate.weight")}
    if moe.correction_bias:
        table["mlp.router.expert_bias"] = Replicated(f"{hf}gate.{tensors.CORRECTION_BIAS}")
    for i in range(moe.num_experts):
        ours = f"mlp.experts.local_experts.{i}."
        gate, up, down = (f"{hf}experts.{i}.{name}_proj.weight" for name in ("gate", "up", "down"))
        table[f"{ours}linear_fc1.weight"] = OfExpert(i, MergeGateUp(gate, up))
        table[f"{ours}linear_fc2.weight"] = OfExpert(i, Replicated(down))
    if moe.shared_intermediate_size:
        table |= _gated_mlp(config, f"{hf}shared_experts.", "mlp.shared_experts.")
    return table
