"""Where an inference server (SGLang) holds each tensor of a checkpoint: fused with others, and cut over its ranks.

A family's table maps the name of a module ("q_proj" of "model.layers.0.self_attn.q_proj.weight") to its place. What no
table names is held whole under its own name by every tensor-parallel rank. Experts are the same in every family: gate
and up projections of all experts lie in `w13_weight`, the down projections in `w2_weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


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
