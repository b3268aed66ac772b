"""What a trainer rank is to run on the batch that it has: passes, and the minibatches that sequences are dealt to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from mcore_adapter.data.planner import PassLimits
    from mcore_adapter.engine import LossFn

Unit = Literal["sequence", "group", "pair"]


def units_of(group_ids: np.ndarray, unit: Unit, rollouts: np.ndarray | None = None) -> np.ndarray:
    """Return the unit of each sequence, [N] int64, from 0 on without gaps; `group_ids` [N] ascend. `rollouts` [N]:
    number of the rollout that each is a branch of, also without gaps; None: there are no branches.

    Raises ValueError where a pair is incomplete."""
    if unit == "sequence":
        return np.arange(len(group_ids)) if rollouts is None else rollouts
    if unit == "group":
        return group_ids
    if rollouts is not None and rollouts.max() + 1 < len(rollouts):
        raise ValueError("algorithms of pairs compare single answers; the workflow returned rollouts with branches")
    if (np.bincount(group_ids) % 2).any():
        raise ValueError("algorithms of pairs need an even number of answers to each prompt; set group_size to one")
    return np.arange(len(group_ids)) // 2  # a group's sequences are adjacent


def deal_minibatches(units: np.ndarray, count: int, *, seed: int) -> list[list[int]]:
    """Deal the sequences at random into `count` minibatches of whole units.

    Where every sequence is a unit, these are the parts of split_minibatches(), whatever the algorithm."""
    parts = split_minibatches(int(units.max()) + 1, count, seed=seed)
    members: list[list[int]] = [[] for _ in range(int(units.max()) + 1)]
    for sequence, unit in enumerate(units.tolist()):
        members[unit].append(sequence)
    return [sorted(i for unit in part for i in members[unit]) for part in parts]


def split_minibatches(num_units: int, count: int, *, seed: int) -> list[list[int]]:
    """Deal the numbers of sequences, or of other units, at random into `count` parts whose sizes differ by at most one;
    none is empty."""
    order = np.random.default_rng(seed).permutation(num_units)
    return [sorted(map(int, part)) for part in np.array_split(order, min(count, num_units))]


@dataclass(frozen=True, kw_only=True)
class InferencePass:
    """An engine's results for every token of the batch."""

    engine: str
    limits: PassLimits
    temperature: float = 1.0
    """Of log-probabilities."""
    replay_routing: bool = False
    """Use the experts that the generators report."""


@dataclass(frozen=True, kw_only=True)
class UpdatePass:
    """One optimizer update of an engine on a minibatch."""

    engine: str
    minibatch: int
    loss: LossFn
    limits: PassLimits
    temperature: float = 1.0
    with_entropy: bool = False
    replay_routing: bool = False
