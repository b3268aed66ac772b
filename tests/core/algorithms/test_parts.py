"""Parts of algorithms where golden numbers do not reach: limits, ties, and the adaptive KL coefficient."""

import math

import pytest
import torch

from core.algorithms.advantages import centred, log_average_exp, maximum_likelihood
from core.algorithms.losses import AdaptiveKL, kl_estimate, kl_loss, small_changes
from helpers.batches import algorithm, batch_of, by_answer, ppo_policy_loss


def test_the_coefficient_follows_the_divergence_by_at_most_a_fifth_of_the_horizon() -> None:
    for divergence, factor in ((0.11, 1 + 0.1 * 0.5), (5.0, 1 + 0.2 * 0.5), (0.0, 1 - 0.2 * 0.5), (0.1, 1.0)):
        kl = AdaptiveKL(coefficient=2.0, target=0.1, horizon=200.0)
        kl.update(divergence, 100)
        assert kl.coefficient == pytest.approx(2.0 * factor)
    constant = AdaptiveKL(coefficient=2.0, target=None, horizon=200.0)
    constant.update(5.0, 100)
    assert constant.coefficient == 2.0


def test_the_adapted_coefficient_counts_from_the_next_step_on_and_comes_back_from_a_checkpoint() -> None:
    changes = {"kl_ctl": 0.5, "kl_in": "both", "kl_target": 0.1, "kl_horizon": 4.0}
    batch, fields = batch_of([1.0, 0.0], lens=[1, 1])
    fields["ref_logprobs"] = fields["rollout_logprobs"] - 2.0 * fields["loss_mask"]  # k1 = 2, far above the target
    chosen = algorithm("rloo", **changes)
    _, metrics = chosen.advantages(batch, fields)
    assert metrics["kl_reward"] == pytest.approx(-0.5 * 2.0)
    adapted = chosen.settings.kl_ctl
    assert adapted == pytest.approx(0.5 * (1 + 0.2 * 2 / 4)) == chosen.settings.kl_coeff
    _, metrics = chosen.advantages(batch, fields)
    assert metrics["kl_reward"] == pytest.approx(-adapted * 2.0)
    fresh, constant = algorithm("rloo", **changes), algorithm("rloo", **{**changes, "kl_target": None})
    fresh.load_state_dict(chosen.state_dict())
    assert fresh.settings == chosen.settings
    constant.load_state_dict(chosen.state_dict())
    assert constant.settings.kl_ctl == 0.5, "without a target the configuration decides"


def test_the_coefficient_depends_on_the_divergence_per_token_and_not_on_the_length_of_answers() -> None:
    adapted = set()
    for lens in ([1, 1], [3, 9], [40, 200]):
        batch, fields = batch_of([1.0, 0.0], lens=lens)
        # k1 = 0.11 for each sampled token; what stands at prompt tokens does not count.
        fields["ref_logprobs"] = torch.where(fields["loss_mask"], fields["rollout_logprobs"] - 0.11, -7.0)
        chosen = algorithm("rloo", kl_ctl=0.5, kl_in="reward", kl_target=0.1, kl_horizon=4.0)
        chosen.advantages(batch, fields)
        adapted.add(round(chosen.settings.kl_ctl, 6))
    assert adapted == {0.5 * (1 + 0.1 * 2 / 4)}


def test_low_var_clamps_the_logarithm_and_the_result() -> None:
    x = torch.tensor([1.0, 30.0, -30.0])
    zero = torch.zeros(3)
    assert kl_estimate(x, zero, "low_var").tolist() == pytest.approx([math.exp(-1), 10.0, 10.0])
    assert kl_estimate(x, zero, "k3")[1].item() == pytest.approx(29.0)


def test_the_ratio_that_multiplies_a_divergence_is_bounded() -> None:
    x, zero, ratio = torch.tensor([2.0, 2.0]), torch.zeros(2), torch.tensor([3.0, 50.0])
    assert kl_loss(x, zero, ratio, "k1", "ratio").tolist() == [6.0, 20.0]


def test_the_penalty_of_a_sequence_is_part_of_its_reward_and_that_of_a_token_comes_after_the_baseline() -> None:
    batch, fields = batch_of([1.0, 0.0], lens=[2, 1])
    fields["ref_logprobs"] = torch.tensor([0.0, -1.5, -2.0, 0.0, -0.5])  # k1: 0.5, 1 and -0.5
    of_sequence, _ = algorithm("dr_grpo", kl_ctl=0.1).advantages(batch, fields)
    assert by_answer(batch, of_sequence["advantages"]) == [pytest.approx([0.4, 0.4]), pytest.approx([-0.4])]
    of_token, _ = algorithm("dr_grpo", kl_ctl=0.1, kl_reward_level="token").advantages(batch, fields)
    assert by_answer(batch, of_token["advantages"]) == [pytest.approx([0.35, 0.4]), pytest.approx([-0.45])]


def test_tokens_of_equal_change_are_dropped_together_whatever_their_order() -> None:
    changes = torch.tensor([0.0, 1.0, -1.0, 9.0])
    mask = torch.tensor([True, True, True, False])
    assert small_changes(changes, mask, 0.6).tolist() == [True, False, False, False]
    assert small_changes(changes, mask, 0.7).tolist() == [True, True, True, False]
    assert small_changes(changes[1:3], mask[:2], 0.5).tolist() == [False, False]


def test_a_ratio_of_a_token_is_cut_off_at_exp_20() -> None:
    old, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    mask = torch.tensor([True])
    loss, _ = ppo_policy_loss(30.0 * one, old, old, -one, mask)
    assert loss.item() == pytest.approx(math.exp(20.0))


def test_groups_without_a_spread_or_of_one_answer_have_no_advantage() -> None:
    ids = torch.tensor([0, 0, 1])
    assert centred(torch.tensor([3.0, 3.0, 7.0]), ids).tolist() == [0.0, 0.0, 0.0]
    assert maximum_likelihood(torch.tensor([3.0, 3.0, 7.0]), ids).tolist() == [0.0, 0.0, 0.0]
    large = log_average_exp(torch.tensor([1000.0, 1000.0, 0.0]), ids, tau=0.5)
    assert large.tolist() == [0.0, 0.0, 0.0]


def test_maxrl_gives_rewards_of_minus_one_and_one_the_advantages_of_zero_and_one() -> None:
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    scores = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    expected = [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    assert maximum_likelihood(scores, ids).tolist() == expected
    assert maximum_likelihood(2 * scores - 1, ids).tolist() == expected
    lowest = torch.full((8,), -0.3)  # their mean in float32 is a little more
    assert maximum_likelihood(lowest, torch.zeros(8, dtype=torch.long)).tolist() == [0.0] * 8
