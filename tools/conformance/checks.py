"""What is compared: rows of the matrix, the settings that compute each here, and the function of each peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from core.algorithms.dpo import DPO
from mcore_adapter.data.batch import PAIR, PackedBatch, sequence_of_token
from mcore_adapter.data.sequences import Sequences
from mcore_adapter.data.weights import weigh_tokens
from mcore_adapter.forward import ModelOutput
from tools.conformance.batches import Batch, to_case
from tools.loss_result import compute

Quantity = Literal["advantages", "loss", "weights", "preferences"]
Result = dict[str, Tensor]
NEEDS: Mapping[Quantity, frozenset[str]] = {
    "advantages": frozenset(),
    "loss": frozenset({"old_logprobs", "advantages"}),
    "weights": frozenset({"old_logprobs", "rollout_logprobs", "advantages"}),
}
"""What a case of `python -m tools.loss` needs; preferences are computed by the objective itself."""


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
    if check.quantity == "preferences":
        return preferences(DPO(**check.settings), batch)
    out = compute(to_case(batch, check.algorithm, check.settings, NEEDS[check.quantity] | check.fields))
    if check.quantity == "loss":
        return {"loss": torch.tensor(out["loss"], dtype=torch.float64), "grads": padded(out["grads"], batch)}
    if check.quantity == "weights":
        return {"weights": padded(out["weights"], batch)}
    rows = [a if isinstance(a, list) else [a] * n for a, n in zip(out["advantages"], batch["lens"], strict=True)]
    return {"advantages": padded(rows, batch)}


def preferences(objective: DPO, batch: Batch) -> Result:
    """Compute the loss of pairs: sequences 0, 2, ... are chosen, each over the one behind it. All tokens are
    trained."""
    lens = torch.tensor([n + 1 for n in batch["lens"]])  # each behind one prompt token
    mask = torch.ones(int(lens.sum()), dtype=torch.bool)
    mask[lens.cumsum(0) - lens] = False

    def flat(name: str) -> Tensor:
        return torch.cat([torch.tensor([0.0, *batch[name][i][:n]]).double() for i, n in enumerate(batch["lens"])])

    numbers = torch.tensor([(i // 2 + 1) * (-1 if i % 2 else 1) for i in range(len(lens))])
    packed = PackedBatch(
        token_ids=torch.zeros(len(mask), dtype=torch.long), cu_seqlens=torch.cat((lens.new_zeros(1), lens.cumsum(0))),
        loss_mask=mask, fields={PAIR: numbers.repeat_interleave(lens), "ref_logprobs": flat("ref_logprobs")},
    )  # fmt: skip
    weighed, divisors = weigh_tokens(packed, objective.token_weights)
    logprobs = flat("logprobs").requires_grad_()
    sequences = Sequences(of_token=sequence_of_token(lens), count=len(lens))
    loss, _ = objective.loss(ModelOutput(logprobs=logprobs), {**weighed.fields, "loss_mask": mask}, sequences)
    loss = loss / divisors.loss
    (grad,) = torch.autograd.grad(loss, logprobs)
    rows = [row[1:].tolist() for row in grad.split(lens.tolist())]
    return {"loss": loss.detach(), "grads": padded(rows, batch)}


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
