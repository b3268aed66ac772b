"""Minibatches hold whole units, and those of single sequences never change."""

import numpy as np
import pytest

from core.data.stored_batch import deal_minibatches, units_of


def groups(*sizes: int) -> np.ndarray:
    """group_ids of groups of these sizes."""
    return np.repeat(np.arange(len(sizes)), sizes)


def test_a_group_is_never_split_and_every_sequence_is_dealt_once() -> None:
    units = units_of(groups(3, 2, 4, 1, 2, 2), "group")
    for seed in range(5):
        parts = deal_minibatches(units, 3, seed=seed)
        assert sorted(i for part in parts for i in part) == list(range(14))
        found = [set(units[part].tolist()) for part in parts]
        assert [len(g) for g in found] == [2, 2, 2] and len(set.union(*found)) == 6
    assert deal_minibatches(units, 3, seed=0) != deal_minibatches(units, 3, seed=1)


def test_a_pair_is_never_split_while_its_group_may_be() -> None:
    units = units_of(groups(4, 2, 6), "pair")
    assert units.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    parts = deal_minibatches(units, 2, seed=0)
    assert all(i ^ 1 in part for part in parts for i in part)
    with pytest.raises(ValueError, match="even number of answers"):
        units_of(groups(2, 3), "pair")
    with pytest.raises(ValueError, match="even number of answers"):
        units_of(groups(3, 3), "pair")


def test_single_sequences_are_dealt_by_the_permutation_of_the_seed() -> None:
    """Recorded training curves rest on this."""
    expected = [sorted(part.tolist()) for part in np.array_split(np.random.default_rng(7).permutation(10), 4)]
    assert deal_minibatches(units_of(groups(5, 5), "sequence"), 4, seed=7) == expected
