"""How the sequences of a step are dealt into minibatches. Algorithms name the unit that is never split."""

from __future__ import annotations

from typing import Literal

import numpy as np

Unit = Literal["sequence", "group", "pair"]


def units_of(group_ids: np.ndarray, unit: Unit) -> np.ndarray:
    """Return the unit of each sequence, [N] int64, from 0 on without gaps; `group_ids` [N] ascend.

    Raises ValueError where a pair is incomplete."""
    if unit == "sequence":
        return np.arange(len(group_ids))
    if unit == "group":
        return group_ids
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
