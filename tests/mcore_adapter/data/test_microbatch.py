"""The plan of microbatches, as properties over arbitrary batches."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_adapter.data.planner import plan_microbatches

CAPACITY = 64
batches = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=80)


def costs_of(seq_lens, attention_cost):
    return [n * (1 + attention_cost * n) for n in seq_lens]


def cost(seq_lens, indices, attention_cost):
    return sum(seq_lens[i] + attention_cost * seq_lens[i] ** 2 for i in indices)


@settings(max_examples=300, deadline=None)
@given(batches, st.integers(1, 5), st.sampled_from([0.0, 0.01]), st.integers(1, 6), st.integers(1, 4))
def test_any_plan_is_a_partition_that_fits_with_equal_counts(
    seq_lens, dp, attention_cost, min_microbatches, multiple_of
):
    plan = plan_microbatches(
        seq_lens,
        dp=dp,
        max_tokens_per_mb=CAPACITY,
        costs=costs_of(seq_lens, attention_cost),
        min_microbatches=min_microbatches,
        multiple_of=multiple_of,
    )
    assert len(plan) == dp
    (count,) = {len(rank) for rank in plan}
    assert count >= 1
    assert count % multiple_of == 0
    microbatches = [mb for rank in plan for mb in rank]
    assert sorted(i for mb in microbatches for i in mb) == list(range(len(seq_lens)))
    assert all(sum(seq_lens[i] for i in mb) <= CAPACITY for mb in microbatches)
    assert sum(not mb for mb in microbatches) == max(0, dp * count - len(seq_lens)), "a filler that was avoidable"


@settings(max_examples=200, deadline=None)
@given(batches, st.integers(1, 5), st.sampled_from([0.0, 0.01]))
def test_where_room_is_no_issue_ranks_differ_by_at_most_one_sequence(seq_lens, dp, attention_cost):
    plan = plan_microbatches(seq_lens, dp=dp, max_tokens_per_mb=10**9, costs=costs_of(seq_lens, attention_cost))
    costs = [cost(seq_lens, [i for mb in rank for i in mb], attention_cost) for rank in plan]
    longest = max(cost(seq_lens, [i], attention_cost) for i in range(len(seq_lens)))
    assert max(costs) - min(costs) <= longest * (1 + 1e-9)


def test_a_pipeline_gets_its_microbatches_as_long_as_there_are_sequences():
    assert len(plan_microbatches([5] * 16, dp=2, max_tokens_per_mb=1000, min_microbatches=4)[0]) == 4
    assert len(plan_microbatches([5] * 6, dp=2, max_tokens_per_mb=1000, min_microbatches=4)[0]) == 3


def test_quadratic_cost_separates_the_long_sequences():
    seq_lens = [100, 100, 1, 1, 1, 1]
    plan = plan_microbatches(seq_lens, dp=2, max_tokens_per_mb=1000, costs=costs_of(seq_lens, 0.1))
    assert [sum(i < 2 for mb in rank for i in mb) for rank in plan] == [1, 1]


def test_ranks_get_microbatches_of_equal_cost_and_run_the_most_expensive_first():
    assert plan_microbatches([10, 6, 5, 1], dp=2, max_tokens_per_mb=10) == [[[0], [3]], [[1], [2]]]


def test_a_sequence_above_the_limit_is_an_error_that_names_key_and_value():
    with pytest.raises(ValueError, match=r"max_tokens_per_mb=8: sequence 1 of the batch has 9 tokens.*at least 9"):
        plan_microbatches([3, 9], dp=1, max_tokens_per_mb=8)
