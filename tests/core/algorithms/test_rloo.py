"""RLOO against its definition written as plain loops, and in the training seam."""

import pytest
import torch

from core.algorithms.advantages import leave_one_out
from helpers.batches import algorithm, batch_of, by_answer


def mean_of_the_others(rewards: list[float]) -> list[float]:
    """Of one group, plain Python."""
    n = len(rewards)
    return [r - (sum(rewards) - r) / (n - 1) for r in rewards] if n > 1 else [0.0]


def test_the_baseline_of_an_answer_is_the_mean_of_the_other_answers_of_its_group() -> None:
    groups = [[1.0, 0.0, 0.0, 0.0], [3.0, -1.0], [0.5, 0.25, 2.0]]
    scores = torch.tensor([r for group in groups for r in group])
    ids = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    expected = [a for group in groups for a in mean_of_the_others(group)]
    assert leave_one_out(scores, ids).tolist() == pytest.approx(expected, rel=1e-6)
    assert leave_one_out(scores, ids)[:4].tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_an_answer_without_others_has_no_baseline_and_no_advantage() -> None:
    assert leave_one_out(torch.tensor([5.0, 1.0, 0.0]), torch.tensor([0, 1, 1])).tolist() == [0.0, 1.0, -1.0]


def test_every_trained_token_has_the_advantage_of_its_answer() -> None:
    batch, fields = batch_of([1.0, 0.0], [2.0, 6.0, 4.0], lens=[1, 3, 2, 1, 2])
    trained_on, metrics = algorithm("rloo").advantages(batch, fields)
    assert by_answer(batch, trained_on["advantages"]) == [[1.0], [-1.0] * 3, [-3.0] * 2, [3.0], [0.0] * 2]
    assert not trained_on["advantages"][~fields["loss_mask"]].any()
    assert metrics["task_reward"] == pytest.approx(13 / 5) and metrics["kl_reward"] == 0.0
    assert torch.equal(trained_on["old_logprobs"], fields["rollout_logprobs"])


def test_the_kl_penalty_of_all_tokens_is_part_of_the_reward_before_the_baseline() -> None:
    batch, fields = batch_of([1.0, 0.0], lens=[2, 1])
    fields["ref_logprobs"] = torch.tensor([0.0, -1.5, -2.0, 0.0, -0.5])
    rloo = algorithm("rloo", kl_ctl=0.1)
    assert rloo.passes == {"ref_logprobs"}
    trained_on, metrics = rloo.advantages(batch, fields)
    # k1 to the reference: 0.5 + 1 and -0.5. Rewards 1 - 0.15 and 0 + 0.05.
    assert by_answer(batch, trained_on["advantages"]) == [pytest.approx([0.8, 0.8]), pytest.approx([-0.8])]
    assert metrics["kl_reward"] == pytest.approx(-(0.15 - 0.05) / 2)
    assert metrics["final_reward"] == pytest.approx(0.5 - 0.05)


def test_tokens_that_are_not_trained_pay_no_kl_penalty() -> None:
    batch, fields = batch_of([1.0, 0.0], lens=[2, 1])
    fields["ref_logprobs"] = torch.tensor([7.0, -1.0, -1.0, -3.0, -1.0])  # 7 and 3 away on the prompts
    trained_on, metrics = algorithm("rloo", kl_ctl=0.1).advantages(batch, fields)
    assert by_answer(batch, trained_on["advantages"]) == [pytest.approx([1.0, 1.0]), pytest.approx([-1.0])]
    assert metrics["kl_reward"] == 0.0
