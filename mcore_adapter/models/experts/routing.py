"""Which experts each token goes to, and how much each counts: the scores of the router, in torch operators.

On GPUs cuda/routing.py computes the same in one kernel a pass. Invariant: each token's result depends on its logits
alone; of experts or groups that score the same, those of lower numbers are chosen, and NaN counts as the best score.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from model_specs.moe import MoEConfig


class Routing(Protocol):
    """A function that routes tokens; differentiable by the logits."""

    def __call__(
        self, logits: Tensor, moe: MoEConfig, *, bias: Tensor | None = None, forced: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the weights of the chosen experts [t, k], and their numbers [t, k] int64, given logits [t,
        num_experts]. `bias` [num_experts] is added to the scores for choosing. A token takes the experts of its row in
        `forced` [t, k], any signed integers, unless one of them is negative."""


def routing_for(tensor: Tensor) -> Routing:
    """Return what routes tokens on the device of this tensor."""
    if tensor.is_cuda:
        from mcore_adapter.cuda.routing import fused_routing

        return fused_routing
    return routing


def routing(
    logits: Tensor, moe: MoEConfig, *, bias: Tensor | None = None, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See Routing; in the format of the logits."""
    scores = all_scores(logits, moe)
    experts = _chosen(scores.detach() if bias is None else scores.detach() + bias, moe)
    if forced is not None:
        experts = torch.where((forced >= 0).all(-1, keepdim=True), forced, experts)
    weights = scores.gather(1, experts)
    if moe.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * moe.scaling, experts


def all_scores(logits: Tensor, moe: MoEConfig) -> Tensor:
    """Return the score of every expert: [t, num_experts]."""
    return logits.softmax(-1) if moe.score_function == "softmax" else logits.sigmoid()


def _chosen(scores: Tensor, moe: MoEConfig) -> Tensor:
    """Choose the experts of each token: [t, num_experts] -> [t, k] int64."""
    if moe.top_k_groups < moe.num_groups:
        grouped = scores.unflatten(1, (moe.num_groups, -1))
        best = grouped.amax(-1) if moe.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _best(best, moe.top_k_groups), True)
        scores = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    return _best(scores, moe.top_k)


def _best(scores: Tensor, num: int) -> Tensor:
    """Return the places of the best of each row, best first: [t, n] -> [t, num]. Unlike topk(), in a defined order."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :num]
