"""How one Megatron parameter relates to Hugging Face tensors: what the tables of tables.py are made of.

One description serves both directions. A `Conversion` lists, for a tensor-parallel rank, the pieces of Hugging Face
tensors that lie one after the other in its Megatron parameter; loading copies pieces in, exporting copies them out.
Invariant: over all ranks of a tensor-parallel group the pieces of a parameter cover each of its Hugging Face tensors
exactly once (replicated ones: on each rank whole), so the round trip is the identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from model_specs.values import ModelConfigError


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
