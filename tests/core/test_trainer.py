"""The PPO loop on hand-made batches and model outputs: what it trains on, in numbers.

Arithmetic stands beside the expected numbers. `A` is the finished answer of two tokens and `B` the cut-off answer of
three tokens of `pair()`; "/ 5" is the division by their trained tokens.
"""

import gzip
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from core.algorithms.policy_gradient import PolicyGradient
from core.config.algorithm import AlgorithmSettings
from core.train.step_batch import SavedSteps
from helpers.fake_training import Answer, PerAnswer, Run, Step, newest_state, recover_store, train

LN2, LN8 = math.log(2.0), math.log(8.0)
SAMPLED = [[-1.0, -2.0], [-1.0, -1.0, -3.0]]
REFERENCE = [[-2.0, -1.5], [-1.5, -1.0, -1.0]]
"""SAMPLED - REFERENCE is [1, -0.5], [0.5, 0, -2]."""


def pair(reward_a: float, reward_b: float, **outputs: Any) -> Step:
    """One group: A finished, B cut off."""
    answers = [Answer(sampled=SAMPLED[0], reward=reward_a), Answer(sampled=SAMPLED[1], reward=reward_b, cut_off=True)]
    return Step(groups=[answers], **outputs)


def two_by_two(reward_a: float, reward_b: float, **outputs: Any) -> Step:
    """As pair(), with two tokens in each answer."""
    answers = [
        Answer(sampled=[-1.0, -2.0], reward=reward_a),
        Answer(sampled=[-1.0, -2.0], reward=reward_b, cut_off=True),
    ]
    return Step(groups=[answers], **outputs)


def shifted(values: PerAnswer, by: PerAnswer) -> list[list[float]]:
    return [[x + d for x, d in zip(row, shift, strict=True)] for row, shift in zip(values, by, strict=True)]


def scaled(values: PerAnswer, factor: float) -> list[list[float]]:
    return [[x * factor for x in row] for row in values]


def assert_close(actual: PerAnswer, expected: PerAnswer) -> None:
    assert [len(row) for row in actual] == [len(row) for row in expected]
    assert [x for row in actual for x in row] == pytest.approx([x for row in expected for x in row], rel=1e-5, abs=1e-6)


def assert_metrics(run: Run, expected: dict[str, float], *, step: int = 1) -> None:
    assert {name: run.metrics[step][name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)


# ---- rewards and advantages


def test_without_a_critic_every_token_of_an_answer_has_the_reward_of_the_answer_as_its_advantage() -> None:
    run = train(pair(1.0, -3.0))
    assert_close(run.trained_on("advantages"), [[1.0, 1.0], [-3.0, -3.0, -3.0]])
    assert_close(run.gradient(), [[-1 / 5, -1 / 5], [3 / 5, 3 / 5, 3 / 5]])
    # task_reward (1 - 3) / 2, advantage (2 * 1 - 3 * 3) / 5, sequences of 2 + 2 and 2 + 3 tokens.
    assert_metrics(
        run,
        {
            "task_reward": -1.0, "kl_reward": 0.0, "final_reward": -1.0, "advantage": -7 / 5, "actor_loss": 7 / 5,
            "loss": 7 / 5, "avg_seq_len": 4.5, "avg_prompt_len": 2.0, "n_tokens": 5, "n_valid_tokens": 5, "n_seqs": 2,
            "no_eos_ratio": 0.5, "disable_value": 1.0, "mask_no_eos_with_zero": 0.0, "grad_norm": 1.5,
        },
    )  # fmt: skip


def test_a_cut_off_answer_scores_zero_after_bias_and_scaling_with_mask_no_eos_with_zero() -> None:
    settings = {"reward_output_bias": 0.5, "reward_output_scaling": 4.0, "mask_no_eos_with_zero": True}
    run = train(pair(1.0, 0.25), **settings)
    assert_close(run.trained_on("advantages"), [[2.0, 2.0], [0.0, 0.0, 0.0]])
    assert_metrics(run, {"task_reward": 1.0, "no_eos_ratio": 0.5, "mask_no_eos_with_zero": 1.0})
    # The zero takes part in the normalisation of its group: mean 1, standard deviation sqrt(2).
    run = train(pair(1.0, 0.25), **settings, group_adv_norm=True)
    assert_close(run.trained_on("advantages"), [[0.5**0.5] * 2, [-(0.5**0.5)] * 3])


# ---- critic


def test_only_a_cut_off_answer_is_bootstrapped_from_the_value_of_its_last_token() -> None:
    # discount 0.5, discount * lambda 0.125
    # A: delta = 0.5 * 0.25 - 0.5 = -0.375, 1 - 0.25 = 0.75;   advantage -0.375 + 0.125 * 0.75, 0.75
    # B: delta = 0.5 * 0.5 - 1 = -0.75, 0.5 * 4 - 0.5 = 1.5, -1 + 0.5 * 4 - 4 = -3;
    #    advantage -0.75 + 0.125 * 1.125, 1.5 + 0.125 * -3, -3
    values = [[0.5, 0.25], [1.0, 0.5, 4.0]]
    advantages = [[-0.28125, 0.75], [-0.609375, 1.125, -3.0]]
    run = train(pair(1.0, -1.0, values=values), disable_value=False, discount=0.5, gae_lambda=0.25)
    assert_close(run.trained_on("advantages"), advantages)
    assert_close(run.gradient(), scaled(advantages, -1 / 5))
    assert_close(run.trained_on("old_values", engine="critic"), values)
    assert_close(run.trained_on("returns", engine="critic"), shifted(values, advantages))
    # The gradient of 0.5 * (value - return)^2 is value - return = -advantage.
    assert_close(run.gradient(engine="critic"), scaled(advantages, -1 / 5))
    # 0.5 * (0.28125^2 + 0.75^2 + 0.609375^2 + 1.125^2 + 3^2) / 5, and (0.5 + 0.25 + 1 + 0.5 + 4) / 5
    assert_metrics(
        run,
        {
            "critic_value_loss": 1.1278564, "critic_loss": 1.1278564, "critic_values": 1.25,
            "critic_value_clip_ratio": 0.0, "critic_grad_norm": 1.5, "disable_value": 0.0,
            "advantage": -2.015625 / 5, "actor_loss": 2.015625 / 5,
        },
    )  # fmt: skip


def test_the_change_of_the_critic_is_clipped_to_value_eps_clip() -> None:
    # Returns 1, old values 0, clipped to 0.25, 0.1, -0.25, 0.25. Larger squared error: clipped 0.75^2, both 0.9^2,
    # unclipped 1.5^2, clipped 0.75^2; a clipped value has no gradient.
    step = Step(
        groups=[[Answer(sampled=[-1.0] * 4, reward=1.0)]], values=[[0.0] * 4], current_values=[[0.5, 0.1, -0.5, 1.5]]
    )
    run = train(step, disable_value=False, value_eps_clip=0.25)
    assert_close(run.trained_on("returns", engine="critic"), [[1.0] * 4])
    assert_close(run.gradient(engine="critic"), [[0.0, -0.9 / 4, -1.5 / 4, 0.0]])
    assert_metrics(
        run, {"critic_value_loss": 0.5 * (0.5625 + 0.81 + 2.25 + 0.5625) / 4, "critic_value_clip_ratio": 0.5}
    )


FIRST = two_by_two(8.0, -2.0, values=[[2.0, 4.0], [1.0, 4.0]])
"""Without statistics the values count as they are: returns 8, 8 and -2 + 4, 2; mean 5, mean square 34, deviation 3."""
SECOND = two_by_two(7.0, 1.0, values=[[0.0, 1 / 3], [-1.0, 1.0]])
"""Denormalised by 5 and 3, the values are 5, 6 and 2, 8: returns 7, 7 and 1 + 8, 9; mean 8, mean square 65."""
THIRD = two_by_two(4.0, 1.0, values=[[0.0, 1.0], [-1.0, 2.0]])

WITH_VALUE_NORM = {"disable_value": False, "value_norm": True}


def mean_and_deviation(means: Sequence[float], mean_squares: Sequence[float]) -> tuple[float, float]:
    """Moving averages with decay 0.99995 over batches, oldest first, weights normalised to 1."""
    weights = [0.99995 ** (len(means) - 1 - i) for i in range(len(means))]
    mean = sum(w * x for w, x in zip(weights, means, strict=True)) / sum(weights)
    mean_square = sum(w * x for w, x in zip(weights, mean_squares, strict=True)) / sum(weights)
    return mean, math.sqrt(mean_square - mean**2)


def test_the_critic_predicts_returns_normalised_by_the_statistics_of_the_trained_tokens() -> None:
    run = train(FIRST, **WITH_VALUE_NORM)
    assert_close(run.trained_on("advantages"), [[6.0, 4.0], [1.0, -2.0]])
    # (8 - 5) / 3 and (2 - 5) / 3
    assert_close(run.trained_on("returns", engine="critic"), [[1.0, 1.0], [-1.0, -1.0]])
    without = train(FIRST, disable_value=False, value_norm=False)
    assert_close(without.trained_on("returns", engine="critic"), [[8.0, 8.0], [2.0, 2.0]])


def test_values_are_denormalised_by_the_statistics_before_the_batch_and_returns_by_those_after_it() -> None:
    run = train(FIRST, SECOND, **WITH_VALUE_NORM)
    # 7 - 5, 7 - 6 and 9 - 2, 9 - 8
    assert_close(run.trained_on("advantages", step=1), [[2.0, 1.0], [7.0, 1.0]])
    assert_close(run.trained_on("old_values", engine="critic", step=1), [[0.0, 1 / 3], [-1.0, 1.0]])
    mean, deviation = mean_and_deviation([5.0, 8.0], [34.0, 65.0])
    expected = [[(7 - mean) / deviation] * 2, [(9 - mean) / deviation] * 2]
    assert_close(run.trained_on("returns", engine="critic", step=1), expected)


def test_a_recovered_run_continues_with_the_same_value_statistics_minibatches_and_versions(tmp_path: Path) -> None:
    store = recover_store(tmp_path)
    train(FIRST, SECOND, checkpoints=store, **WITH_VALUE_NORM)
    start = newest_state(store)
    run = train(THIRD, start=start, **WITH_VALUE_NORM)
    mean, deviation = mean_and_deviation([5.0, 8.0], [34.0, 65.0])
    # B: return 1 + V_last
    values = [[mean, deviation + mean], [-deviation + mean, 2 * deviation + mean]]
    returns = [[4.0, 4.0], [1 + values[1][1]] * 2]
    assert_close(run.trained_on("advantages", step=2), shifted(returns, scaled(values, -1)))
    batch_mean = (2 * returns[0][0] + 2 * returns[1][0]) / 4
    batch_mean_square = (2 * returns[0][0] ** 2 + 2 * returns[1][0] ** 2) / 4
    mean, deviation = mean_and_deviation([5.0, 8.0, batch_mean], [34.0, 65.0, batch_mean_square])
    expected = [[(x - mean) / deviation for x in row] for row in returns]
    assert_close(run.trained_on("returns", engine="critic", step=2), expected)
    assert "take 2" in run.events and "push 3" in run.events and list(run.metrics) == [3]


class Counting(PolicyGradient):
    """An algorithm with a state of its own, which reads exactly what it saved."""

    def __init__(self, settings: AlgorithmSettings, options: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.memory = 0

    def advantages(self, batch: Any, fields: Any) -> Any:
        self.memory += 1
        return super().advantages(batch, fields)

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self.memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.memory = state["memory"]


def test_the_state_of_a_users_algorithm_is_loaded_from_a_checkpoint_and_not_at_the_first_start(tmp_path: Path) -> None:
    store, own = recover_store(tmp_path), {"name": f"{__name__}:Counting", "disable_value": True}
    run = train(FIRST, SECOND, checkpoints=store, **own)
    assert run.state["algorithm"] == {"memory": 2}
    run = train(THIRD, start=newest_state(store), **own)
    assert run.state["algorithm"] == {"memory": 3}


# ---- KL divergence from the reference


def test_kl_in_reward_is_subtracted_from_the_rewards_of_tokens_and_is_no_part_of_the_loss() -> None:
    run = train(pair(1.0, 2.0, reference=REFERENCE), kl_ctl=0.5, kl_in="reward")
    # k1 is [1, -0.5], [0.5, 0, -2]. Rewards: -0.5, 1 + 0.25 and -0.25, 0, 2 + 1; advantages are sums from the right.
    advantages = [[0.75, 1.25], [2.75, 3.0, 3.0]]
    assert_close(run.trained_on("advantages"), advantages)
    assert_close(run.gradient(), scaled(advantages, -1 / 5))
    # Penalties of the two answers: 0.5 - 0.25 and 0.25 - 1; mean -0.25.
    kl = {"kl_reward": 0.25, "ref_kl": -1 / 5}
    assert_metrics(run, {"task_reward": 1.5, **kl, "final_reward": 1.75, "advantage": 10.75 / 5})


FAR_REFERENCE = shifted(SAMPLED, [[-LN2, LN2], [0.0, -2 * LN2, 2 * LN2]])
"""log-ratios x to it: ln 2, -ln 2 and 0, ln 4, -ln 4."""


def test_kl_in_loss_is_k3_with_its_coefficient_and_changes_no_reward() -> None:
    run = train(pair(1.0, 2.0, reference=FAR_REFERENCE), kl_ctl=0.5, kl_in="loss")
    assert_close(run.trained_on("advantages"), [[1.0, 1.0], [2.0, 2.0, 2.0]])
    # d k3 / d logprob = 1 - e^-x: 0.5, -1 and 0, 0.75, -3
    expected = [[-1 + 0.25, -1 - 0.5], [-2.0, -2 + 0.375, -2 - 1.5]]
    assert_close(run.gradient(), scaled(expected, 1 / 5))
    # The sum of x is 0; the sum of e^-x - 1 is -0.5 + 1 + 0 - 0.75 + 3 = 2.75.
    assert_metrics(
        run,
        {
            "ref_kl": 2.75 / 5, "actor_loss": -8 / 5, "loss": -8 / 5 + 0.5 * 2.75 / 5, "kl_reward": 0.0,
            "final_reward": 1.5, "advantage": 8 / 5,
        },
    )  # fmt: skip


# ---- policies of other versions

OLD = shifted(SAMPLED, [[LN2, -LN2], [0.0, LN8, 0.0]])
"""Weights of old over sampled: 2, 0.5 and 1, 8, 1."""
RATIOS = [[math.log(1.5), 0.0], [math.log(1.1), 0.0, math.log(0.5)]]
"""Logarithms of current over old. With advantages 1 for A and -1 for B and clipping to 0.75 .. 1.25, the losses are
-1.25, -1 and 1.1, 1, 0.75; those at a bound have no gradient."""


@pytest.mark.parametrize(("cap", "weight"), [(5.0, 0.0), (8.5, 8.0), (None, 8.0)])
def test_the_decoupled_loss_clips_around_the_old_policy_and_weighs_by_old_over_sampled(cap, weight) -> None:
    step = pair(1.0, -1.0, old=OLD, current=shifted(OLD, RATIOS))
    run = train(step, correction="decoupled", ppo_n_minibatches=2, eps_clip=0.25, behave_imp_weight_cap=cap)
    assert_close(run.trained_on("old_logprobs"), OLD)
    assert_close(run.trained_on("rollout_logprobs"), SAMPLED)
    # Each minibatch is one answer. Above the cap a token is dropped, but still counted in the division.
    assert_close(run.gradient(), [[0.0, -0.5 / 2], [1.1 / 3, weight / 3, 0.0]])
    assert_metrics(
        run,
        {
            "actor_loss": ((-1.25 * 2 - 0.5) / 2 + (1.1 + weight + 0.75) / 3) / 2,
            "behave_capped_ratio": (0 / 2 + (weight == 0) / 3) / 2,
            "behave_imp_weight": (2.5 / 2 + 10 / 3) / 2,
            "behave_approx_kl": (0 / 2 + LN8 / 3) / 2,
            "importance_weight": (2.5 / 2 + 2.6 / 3) / 2,
            "ppo_approx_kl": (math.log(1.5) / 2 + math.log(0.55) / 3) / 2,
            "actor_clip_ratio": (1 / 2 + 1 / 3) / 2,
        },
    )


def test_without_the_decoupled_loss_the_ratio_is_to_the_sampled_log_probabilities_and_no_cap_applies() -> None:
    step = pair(1.0, -1.0, old=OLD, current=shifted(SAMPLED, RATIOS))
    run = train(step, correction="bypass", ppo_n_minibatches=2, eps_clip=0.25, behave_imp_weight_cap=0.5)
    assert run.passes == []
    assert_close(run.trained_on("old_logprobs"), SAMPLED)
    assert_close(run.gradient(), [[0.0, -1 / 2], [1.1 / 3, 1 / 3, 0.0]])
    assert_metrics(
        run,
        {
            "actor_loss": ((-1.25 - 1) / 2 + (1.1 + 1 + 0.75) / 3) / 2, "behave_imp_weight": 1.0,
            "behave_approx_kl": 0.0, "behave_capped_ratio": 0.0,
        },
    )  # fmt: skip


def test_kl_in_reward_of_the_decoupled_loss_is_that_of_the_old_policy() -> None:
    # old - reference is [1, -0.5], [0.5, 0, -2] as above, old - sampled [0.5, -0.5], [0.5, -0.5, 0].
    old, reference = [[-0.5, -2.5], [-0.5, -1.5, -3.0]], [[-1.5, -2.0], [-1.0, -1.5, -1.0]]
    run = train(pair(1.0, 2.0, old=old, reference=reference), correction="decoupled", kl_ctl=0.5, kl_in="reward")
    assert {p.engine for p in run.passes} == {"actor", "ref"}
    assert_close(run.trained_on("advantages"), [[0.75, 1.25], [2.75, 3.0, 3.0]])
    up, down = math.exp(0.5), math.exp(-0.5)
    expected = [[0.75 * up, 1.25 * down], [2.75 * up, 3.0 * down, 3.0]]
    assert_close(run.gradient(), scaled(expected, -1 / 5))


# ---- temperature and entropy


def test_every_log_probability_is_computed_at_the_temperature_of_sampling() -> None:
    step = pair(1.0, 2.0, reference=REFERENCE, values=[[0.0] * 2, [0.0] * 3])
    run = train(step, temperature=0.7, correction="decoupled", kl_ctl=0.5, disable_value=False, ppo_n_minibatches=2)
    temperatures = {(p.engine, p.method): p.temperature for p in run.passes}
    assert temperatures == {("actor", "logprobs"): 0.7, ("ref", "logprobs"): 0.7, ("critic", "values"): 1.0}
    assert [update.temperature for update in run.of("actor")] == [0.7, 0.7]


def test_the_entropy_is_raised_with_its_coefficient_and_computed_only_then() -> None:
    step = pair(1.0, 2.0, entropy=[[0.5, 1.5], [1.0, 1.0, 2.0]])
    run = train(step, entropy_coeff=0.1)
    assert_close(run.entropy_gradient(), [[-0.1 / 5] * 2, [-0.1 / 5] * 3])
    assert_close(run.gradient(), [[-1 / 5] * 2, [-2 / 5] * 3])
    assert_metrics(run, {"entropy": 6 / 5, "actor_loss": -8 / 5, "loss": -8 / 5 - 0.1 * 6 / 5})
    without = train(step, entropy_coeff=0.0)
    assert not without.of("actor")[0].with_entropy and "entropy" not in without.metrics[1]


# ---- minibatches

LENGTHS, REWARDS = [1, 2, 3, 1, 2, 3, 4], [0.0, 1.0, -2.0, 3.0, 5.0, -4.0, 7.0]


def seven() -> Step:
    answers = [Answer(sampled=[-1.0 - i] * n, reward=r) for i, (n, r) in enumerate(zip(LENGTHS, REWARDS, strict=True))]
    return Step(groups=[[answer] for answer in answers], values=[[0.125 * i] * n for i, n in enumerate(LENGTHS)])


def test_each_step_deals_every_sequence_once_into_minibatches_of_another_partition() -> None:
    run = train(seven(), seven(), seven(), seven(), ppo_n_minibatches=3)
    partitions = []
    for step in range(4):
        parts = [update.sequences for update in run.of("actor", step)]
        assert sorted(map(len, parts)) == [2, 2, 3]
        assert sorted(i for part in parts for i in part) == list(range(7))
        partitions.append(frozenset(map(frozenset, parts)))
    assert len(set(partitions)) == 4


def test_a_repeated_step_has_the_same_minibatches(tmp_path: Path) -> None:
    store = recover_store(tmp_path)
    train(seven(), seven(), checkpoints=store, ppo_n_minibatches=3)
    continued = train(seven(), start=newest_state(store), ppo_n_minibatches=3)
    whole = train(seven(), seven(), seven(), ppo_n_minibatches=3)
    assert [u.sequences for u in continued.of("actor", 2)] == [u.sequences for u in whole.of("actor", 2)]


def test_actor_and_critic_pass_over_the_minibatches_of_a_batch_as_often_as_their_samples_are_reused() -> None:
    run = train(
        seven(), ppo_n_minibatches=3, disable_value=False, actor_sample_reuse=2, critic_sample_reuse=3
    )  # fmt: skip
    once = train(seven(), ppo_n_minibatches=3, disable_value=False)
    dealt = [update.sequences for update in once.of("actor")]
    assert [update.sequences for update in run.of("actor")] == dealt * 2
    assert [update.sequences for update in run.of("critic")] == dealt * 3


def test_the_loglinear_proximal_policy_counts_ages_from_the_version_that_is_trained() -> None:
    answers = [Answer(sampled=[-1.0, -1.0, -1.0], reward=1.0, versions=[0, 1, 2])]
    run = train(
        Step(groups=[answers]),
        Step(groups=[answers]),
        Step(groups=[answers]),
        correction="decoupled",
        proximal="loglinear",
    )
    assert_close(run.trained_on("proximal_share", step=2), [[2 / 3, 1 / 2, 0.0]])


# ---- versions, order, reports


def test_a_step_scores_trains_pushes_and_reports_in_this_order() -> None:
    step = pair(1.0, 2.0, reference=REFERENCE, values=[[0.0] * 2, [0.0] * 3])
    run = train(step, step, correction="decoupled", kl_ctl=0.5, disable_value=False, ppo_n_minibatches=2)
    scores = {"logprobs actor": "score", "logprobs ref": "score", "values critic": "score"}
    events = [scores.get(event, event) for event in run.events]

    def one_step(number: int, *taken: str) -> list[str]:
        return [
            f"batch {number}", "sync_rejoined", "offload_generators", "score", "score", "score",
            f"advantages {number}", f"samples {number}", "train critic", "train critic", "train actor", "train actor",
            *taken, f"push {number + 1}", f"set_version {number + 1}", f"after_step {number + 1}",
            f"report {number + 1}", f"after_report {number + 1}",
        ]  # fmt: skip

    # A batch is chosen and cut while the weights of the step before are pushed.
    assert events == ["take 0", *one_step(0, "take 1"), *one_step(1)]
    timed = {name for name in run.metrics[1] if name.startswith("time/")}
    assert timed == {
        "time/wait_for_rollout", "time/offload_generators", "time/old_log-probs", "time/ref_log-probs", "time/values",
        "time/advantages", "time/critic_update", "time/update", "time/push", "time/step",
    }  # fmt: skip


def test_only_a_step_that_is_saved_computes_the_entropy_and_trains_as_the_others(tmp_path: Path) -> None:
    step = pair(1.0, 2.0, entropy=[[0.5, 1.0], [0.25, 0.75, 2.0]])
    run = train(step, step, step, saved_steps=SavedSteps(folder=tmp_path, every=2, name="grpo", settings={}))
    assert [(one.step, one.method, one.temperature) for one in run.passes] == [(1, "entropy", 1.0)]
    assert run.field_names(step=1) == run.field_names(step=0)
    assert run.trained_on("advantages", step=1) == run.trained_on("advantages", step=0)
    (file,) = tmp_path.iterdir()
    case = json.loads(gzip.decompress(file.read_bytes()))
    assert [one["entropy"] for one in case["sequences"]] == [[0.0, 0.0, 0.5, 1.0], [0.0, 0.0, 0.25, 0.75, 2.0]]
    assert [one["advantages"][-1] for one in case["tokens"]] == [1.0, 2.0]


def test_staleness_counts_from_the_oldest_trained_token_to_the_version_of_the_step(tmp_path: Path) -> None:
    # At version 2 the oldest trained tokens have versions 2, 0, 1: ages 0, 2, 1.
    answers = [
        Answer(sampled=[-1.0, -1.0], reward=1.0, versions=[2, 2]),
        Answer(sampled=[-1.0, -1.0, -1.0], reward=1.0, versions=[0, 1, 2]),
        Answer(sampled=[-1.0, -1.0], reward=1.0, versions=[0, 1], untrained=frozenset({0})),
    ]
    store = recover_store(tmp_path)
    train(pair(1.0, 1.0), pair(1.0, 1.0), checkpoints=store)
    run = train(Step(groups=[answers]), start=newest_state(store))
    assert_metrics(run, {"staleness/mean": 1.0, "staleness/max": 2.0, "n_tokens": 7, "n_valid_tokens": 6}, step=3)
    assert run.metrics[3]["staleness/ages"].as_json() == {"0": 1, "1": 1, "2": 1}
    assert run.metrics[3]["tokens_per_second"] == pytest.approx(7 / run.metrics[3]["time/step"])
    assert run.metrics[3]["memory/trainer_gib"] == 1.5 and run.metrics[3]["memory/driver_gib"] > 0


def test_the_report_holds_the_figures_of_rollout_and_push_and_the_prompts_consumed() -> None:
    group = [Answer(sampled=[-1.0], reward=1.0)]
    step = Step(groups=[group, group], figures={"rollout/in_flight": 3.0})
    run = train(step, step)
    assert_metrics(run, {"rollout/in_flight": 3.0, "push/seconds": 4.0, "push/gigabytes": 5.0}, step=2)
    assert run.consumed == {1: ["0", "1"], 2: ["100", "101"]}


def test_the_log_holds_the_lines_of_a_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stale = Step(groups=[[Answer(sampled=[-1.0], reward=1.0, versions=[v]) for v in (1, 0, 1)]])
    train(pair(1.0, 1.0), stale, pair(1.0, 1.0), sample_steps=2)
    answers = [line for line in caplog.text.splitlines() if "answer: answer" in line]
    assert answers == ["  answer: answer of step 1", "  answer: answer of step 2"]
    assert "Epoch 1/1 step 2/3 (global step 2) finishes. Average #tokens per batch is 96." in caplog.text
    assert "Staleness of the batch (age in steps: trajectories): {0: 2, 1: 1}" in caplog.text
    assert (
        "RPC name actor_train returns {'ppo_approx_kl': 0.0, 'actor_loss': -1.0, 'actor_clip_ratio': 0.0,"
        in caplog.text
    )


# ---- passes


def test_only_the_policy_replays_the_experts_of_the_generators() -> None:
    answers = [Answer(sampled=SAMPLED[0], reward=1.0, experts=3), Answer(sampled=SAMPLED[1], reward=0.0, experts=5)]
    step = Step(groups=[answers], reference=REFERENCE, values=[[0.0] * 2, [0.0] * 3])
    run = train(step, correction="decoupled", ppo_n_minibatches=2, kl_ctl=0.5, disable_value=False)
    assert {p.engine: "routed_experts" in p.fields for p in run.passes} == {
        "actor": True,
        "ref": False,
        "critic": False,
    }
    experts = {i: values for update in run.of("actor") for i, values in update.routed_experts.items()}
    assert experts == {0: [3, 3], 1: [5, 5, 5]}
    assert all(update.routed_experts == {} for update in run.of("critic"))


def test_a_pass_that_ran_out_of_memory_is_repeated_in_smaller_microbatches_for_the_rest_of_the_run() -> None:
    step = pair(1.0, 2.0, reference=REFERENCE, values=[[0.0] * 2, [0.0] * 3])
    run = train(
        step, step, kl_ctl=0.5, disable_value=False, tokens_per_mb=64, fits={"train actor": 10, "logprobs ref": 20}
    )
    assert {u.engine: u.max_tokens_per_mb for u in run.updates} == {"actor": 8, "critic": 64}
    assert {p.engine: p.max_tokens_per_mb for p in run.passes} == {"ref": 16, "critic": 64}
    assert [len(run.of("actor", step)) for step in (0, 1)] == [1, 1]
    assert run.state["memory"] == {"actor_train": 8, "ref_inf": 16}


def test_tokens_outside_the_loss_mask_are_neither_trained_nor_counted() -> None:
    answers = [
        Answer(sampled=[-1.0, -2.0, -1.0], reward=1.0, untrained=frozenset({1}), prompt_tokens=3),
        Answer(sampled=[-3.0, -3.0], reward=-2.0, prompt_tokens=1),
    ]
    run = train(Step(groups=[answers]), adv_norm=True)
    # Advantages 1, 1, -2, -2: mean -0.5, standard deviation 1.5.
    assert_close(run.trained_on("advantages"), [[1.0, 1.0], [-1.0, -1.0]])
    assert_close(run.gradient(), [[-1 / 4, -1 / 4], [1 / 4, 1 / 4]])
    assert_metrics(
        run, {"n_tokens": 5, "n_valid_tokens": 4, "avg_prompt_len": 2.0, "avg_seq_len": 4.5, "no_eos_ratio": 0.0}
    )
