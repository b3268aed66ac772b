"""Per-row inputs of the routers of a microbatch, and the check of experts that a batch prescribes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mcore_adapter.data.batch import ROUTED_EXPERTS, PackedBatch
from model_specs.config import ModelConfig


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
    rows_of_ranks: list[int] = field(default_factory=list)
    """s of each expert-parallel rank; empty until the dispatcher of the first layer has exchanged them."""


def check_routed_experts(batch: PackedBatch, config: ModelConfig) -> None:
    """Check the experts that a batch prescribes, if it has any. Raises ValueError."""
    experts = batch.fields.get(ROUTED_EXPERTS)
    if experts is None:
        return
    if config.moe is None:
        raise ValueError(f"{ROUTED_EXPERTS} is given, but a {config.model_type} model has no experts")
    shape = (batch.num_tokens, config.num_layers, config.moe.top_k)
    if tuple(experts.shape) != shape:
        raise ValueError(f"{ROUTED_EXPERTS} has shape {tuple(experts.shape)}, expected [T, layers, k] = {shape}")
    sparse = experts[:, torch.tensor(config.moe.sparse_layers)]
    forced = sparse[(sparse >= 0).all(-1)]
    if forced.numel() and int(forced.max()) >= config.moe.num_experts:
        raise ValueError(f"{ROUTED_EXPERTS} names expert {int(forced.max())}; there are {config.moe.num_experts}")
    if bool((forced.sort(-1).values.diff(dim=-1) == 0).any()):
        raise ValueError(f"{ROUTED_EXPERTS} names an expert twice for the same token and layer")
