"""Per-sequence sums against plain loops, their gradients against finite differences, and both over gloo ranks."""

import pytest
import torch

from allocation import ParallelLayout
from helpers.mcore_ranks import Rank, RankPool
from mcore_adapter.data.batch import Sequences

OF_TOKEN = torch.tensor([0, 0, 2, 2, 2])
"""Sequence 1 has no token here."""


def test_sums_means_and_spread_values_are_those_of_each_sequence() -> None:
    sequences = Sequences(of_token=OF_TOKEN, count=3)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0])
    mask = torch.tensor([True, True, True, True, False])
    assert sequences.sum(x).tolist() == [3.0, 0.0, 16.0]
    assert sequences.sum(mask).tolist() == [2.0, 0.0, 2.0]
    assert sequences.mean(x, mask).tolist() == [1.5, 0.0, 3.5]
    assert sequences.spread(torch.tensor([10.0, 20.0, 30.0])).tolist() == [10.0, 10.0, 30.0, 30.0, 30.0]


def test_the_gradient_of_sums_is_that_of_finite_differences() -> None:
    sequences = Sequences(of_token=OF_TOKEN, count=3)
    mask = torch.tensor([True, False, True, True, True])
    x = torch.tensor([0.1, -0.2, 0.3, 0.4, -0.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: sequences.sum(t).square(), x)
    assert torch.autograd.gradcheck(lambda t: sequences.spread(sequences.mean(t, mask).exp()) * t, x)


def split_run(rank: Rank, parts: list[list[int]]) -> tuple[list[float], list[float]]:
    """On context-parallel ranks that hold these tokens: the sums, and the gradient of a loss that mixes tokens."""
    with rank.joined(ParallelLayout(cp=len(parts))) as (parallel, _):
        mine = torch.tensor(parts[parallel.cp_rank], dtype=torch.int64)
        x = torch.arange(1.0, 6.0, dtype=torch.float64)[mine].requires_grad_()
        sequences = Sequences(of_token=OF_TOKEN[mine], count=3, group=parallel.cp_group)
        sums = sequences.sum(x)
        (sequences.spread(sums.square()) * x).sum().backward()
        assert x.grad is not None
        return sums.tolist(), x.grad.tolist()


@pytest.mark.parametrize("parts", [[[0, 2], [1, 3, 4]], [[0, 1, 2, 3, 4], []]], ids=["mixed", "one has none"])
def test_sums_over_ranks_and_their_gradients_are_those_of_one_process(ranks: RankPool, parts: list[list[int]]) -> None:
    x = torch.arange(1.0, 6.0, dtype=torch.float64, requires_grad=True)
    whole = Sequences(of_token=OF_TOKEN, count=3)
    (whole.spread(whole.sum(x).square()) * x).sum().backward()
    assert x.grad is not None
    for part, (sums, gradient) in zip(parts, ranks.run(split_run, 2, parts), strict=True):
        assert sums == [3.0, 0.0, 12.0]
        assert gradient == pytest.approx(x.grad[part].tolist(), rel=1e-12)
