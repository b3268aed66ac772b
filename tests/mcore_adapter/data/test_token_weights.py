"""Weights of tokens against their definitions written as plain loops."""

import pytest
import torch

from helpers.engine_cases import random_batch
from mcore_adapter.data.batch import ROLLOUTS, TOKEN_WEIGHTS, sequence_mean, token_mean, token_sum, weigh_tokens


def batch_with_a_masked_sequence():
    batch = random_batch(num_sequences=5)
    batch.loss_mask[batch.cu_seqlens[1] : batch.cu_seqlens[2]] = False
    return batch


def test_branches_of_a_rollout_weigh_as_one_sequence() -> None:
    batch = random_batch(num_sequences=5)
    rollouts = torch.tensor([4, 2, 4, 3, 4])  # the second and the fourth are whole rollouts
    per_token = rollouts.repeat_interleave(batch.seq_lens)
    weights = sequence_mean(batch.with_fields(**{ROLLOUTS: per_token}))
    for rollout in (2, 3, 4):
        of_rollout = weights[batch.loss_mask & (per_token == rollout)]
        assert of_rollout.tolist() == pytest.approx([1 / len(of_rollout)] * len(of_rollout), rel=1e-15)
    assert not weights[~batch.loss_mask].any()


def test_a_sequence_without_trained_tokens_leaves_the_count_of_sequences() -> None:
    batch = batch_with_a_masked_sequence()
    weighed, divisors = weigh_tokens(batch, sequence_mean)
    assert divisors.loss == pytest.approx(4, rel=1e-14) and divisors.metrics == pytest.approx(4, rel=1e-14)
    assert weighed.fields[TOKEN_WEIGHTS].dtype == torch.float32


def test_a_minibatch_without_trained_tokens_is_divided_by_one() -> None:
    batch = random_batch(num_sequences=2)
    batch.loss_mask.zero_()
    for weights in (token_mean, sequence_mean):
        divisors = weigh_tokens(batch, weights)[1]
        assert divisors.loss == divisors.metrics == 1.0


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (lambda batch: torch.ones(3), "expected"),
        (lambda batch: batch.loss_mask * float("nan"), "nan"),
        (lambda batch: -batch.loss_mask.float(), "sum of -"),
        (lambda batch: token_sum(batch, divisor=-5.0), "sum of -5"),
    ],
)
def test_weights_that_nothing_can_be_divided_by_are_one_clear_error(weights, message: str) -> None:
    with pytest.raises(ValueError, match=f"token_weights: .*{message}"):
        weigh_tokens(random_batch(num_sequences=2), weights)
