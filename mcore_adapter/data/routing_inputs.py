"""Per-row inputs of the routers of a microbatch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RoutingInputs:
    """Inputs of the routers beside hidden states: s rows of this rank, m tokens that predict another.

    A row may stand for tokens of several sequences (shared prompts), a padding row stands for none.
    """

    rows: Tensor  # [m] int64: row of each token
    sequences: Tensor  # [m] int64: its sequence, of num_sequences
    lens: Tensor  # [num_sequences] float32: such tokens of each whole sequence
    batch_tokens: int
    """Such tokens of the whole batch."""
    experts: Tensor | None  # [s, num_layers, k] chosen beforehand, signed integers; negative: the router chooses
