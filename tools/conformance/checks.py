"""What is compared: rows of the matrix, the settings that compute each here, and the function of each peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from tools.conformance.batches import Batch, to_case
from tools.loss import compute

Quantity = Literal["advantages", "loss", "weights"]
Result = dict[str, Tensor]
NEEDS: Mapping[Quantity, frozenset[str]] = {
    "advantages": frozenset(),
    "loss": frozenset({"old_logprobs", "advantages"}),
    "weights": frozenset({"old_logprobs", "rollout_logprobs", "advantages"}),
}


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How a peer differs. It is published only where `formula` gives the numbers of the peer."""

    text: str
    formula: Callable[[Batch], Result]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function of a peer, as its adapter names it."""

    operation: str
    options: Mapping[str, Any] = field(default_factory=dict)
    deviation: Deviation | None = None
    """None: equal to 1e-6."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the matrix."""

    name: str
    quantity: Quantity
    algorithm: str
    settings: Mapping[str, Any]
    peers: Mapping[str, Call]
    kind: str = "usual"
    fields: frozenset[str] = frozenset()
    """Lists of each token that the case has besides those of its quantity."""


def ours(check: Check, batch: Batch) -> Result:
    """Compute a row with the code that trains. Values of tokens are [B, T]."""
    out = compute(to_case(batch, check.algorithm, check.settings, NEEDS[check.quantity] | check.fields))
    if check.quantity == "loss":
        return {"loss": torch.tensor(out["loss"], dtype=torch.float64), "grads": padded(out["grads"], batch)}
    if check.quantity == "weights":
        return {"weights": padded(out["weights"], batch)}
    rows = [a if isinstance(a, list) else [a] * n for a, n in zip(out["advantages"], batch["lens"], strict=True)]
    return {"advantages": padded(rows, batch)}


def padded(rows: list[list[float]], batch: Batch) -> Tensor:
    """Pad to [B, T], 0 where the batch is not trained."""
    mask = torch.tensor(batch["mask"], dtype=torch.float64)
    out = torch.zeros_like(mask)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return out * mask


def of(batch: Batch, name: str) -> Tensor:
    """Return a field of the batch in float64."""
    return torch.tensor(batch[name], dtype=torch.float64)
