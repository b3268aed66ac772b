"""Trajectories laid end to end keep every token's own data."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from core.data.rollout_batch import pack_trajectories
from core.data.stored_batch import deal_minibatches, split_minibatches, units_of
from rollout.types import PROMPT_VERSION, FinishReason, Trajectory


def trajectory(
    prompt: list[int], sampled: list[int], versions: list[int], reward: float, finish: FinishReason
) -> Trajectory:
    n = len(prompt)
    return Trajectory(
        query_id="q",
        token_ids=np.array(prompt + sampled, np.int32),
        loss_mask=np.array([False] * n + [True] * len(sampled)),
        rollout_logprobs=np.array([0.0] * n + [-0.5] * len(sampled), np.float32),
        versions=np.array([PROMPT_VERSION] * n + versions, np.int32),
        reward=reward,
        finish_reason=finish,
    )


def test_packing_keeps_order_groups_and_ages() -> None:
    batch = pack_trajectories(
        [
            [trajectory([1, 2], [3], [4], 1.0, "stop"), trajectory([1, 2], [5, 6], [3, 4], 0.0, "length")],
            [trajectory([7], [8, 9], [5, 5], 0.5, "stop")],
        ],
        episodes=["s/b/0", "s/a/0"],
    )
    assert batch.episodes == ["s/b/0", "s/a/0"]
    assert batch.token_ids.tolist() == [1, 2, 3, 1, 2, 5, 6, 7, 8, 9]
    assert batch.cu_seqlens.tolist() == [0, 3, 7, 10]
    assert batch.group_ids.tolist() == [0, 0, 1] and batch.prompt_lens.tolist() == [2, 2, 1]
    assert batch.no_eos.tolist() == [False, True, False]
    assert batch.ages(5).tolist() == [1, 2, 0]
    packed = batch.to_packed()
    assert packed.select([1]).token_ids.tolist() == [1, 2, 5, 6]
    assert packed.select([2, 0]).fields["rollout_logprobs"].tolist() == [0.0, -0.5, -0.5, 0.0, 0.0, -0.5]


def test_branches_of_a_rollout_count_once_in_rewards_and_units() -> None:
    one, two = trajectory([1], [2], [0], 1.0, "stop"), trajectory([1], [2, 3, 4], [0] * 3, 0.0, "stop")
    groups = [[replace(one, rollout=7), replace(two, rollout=9), replace(two, rollout=7)], [one, one]]
    batch = pack_trajectories(groups, episodes=["a", "b"])
    assert batch.rollouts.tolist() == [0, 1, 0, 2, 3] and batch.has_branches
    assert batch.of_rollouts(torch.tensor(batch.rewards)).tolist() == [0.5, 0.0, 1.0, 1.0]
    assert batch.group_ids_of_rollouts.tolist() == [0, 0, 1, 1]
    assert batch.reward_figures()["reward/mean"] == 0.625
    assert units_of(batch.group_ids, "sequence", batch.rollouts).tolist() == [0, 1, 0, 2, 3]
    minibatches = deal_minibatches(units_of(batch.group_ids, "sequence", batch.rollouts), 4, seed=0)
    assert [0, 2] in minibatches
    with pytest.raises(ValueError, match="pairs compare single answers"):
        units_of(np.zeros(4, np.int64), "pair", np.array([0, 1, 1, 2]))


def test_rewards_groups_and_lengths_are_reported() -> None:
    def group(*rewards: float) -> list[Trajectory]:
        return [trajectory([1, 2], [3] * (i + 1), [0] * (i + 1), reward, "stop") for i, reward in enumerate(rewards)]

    groups = [group(1.0, 1.0), group(2.0, 1.0), group(-1.0, -1.0), group(1.0, -1.0)]
    figures = pack_trajectories(groups, episodes=list("abcd")).reward_figures(right_at=1.0)
    rewards = np.array([1, 1, 2, 1, -1, -1, 1, -1], np.float32)
    assert figures == {
        "reward/mean": float(rewards.mean()), "reward/std": float(rewards.std()), "reward/min": -1.0,
        "reward/max": 2.0, "reward/right": 0.625, "groups/solved": 0.5, "groups/unsolved": 0.25, "groups/equal": 0.5,
        "answer_length/mean": 1.5, "answer_length/max": 2.0, "sampled_entropy": 0.5,
    }  # fmt: skip


def test_without_the_reward_of_a_right_answer_no_answer_counts_as_right() -> None:
    graded = [trajectory([1], [2], [0], reward, "stop") for reward in (0.3, 0.3, 1.0, 0.9)]
    batch = pack_trajectories([graded[:2], graded[2:]], episodes=list("ab"))
    assert not {"reward/right", "groups/solved", "groups/unsolved"} & batch.reward_figures().keys()
    figures = batch.reward_figures(right_at=0.9)
    assert (figures["reward/right"], figures["groups/solved"], figures["groups/unsolved"]) == (0.5, 0.5, 0.5)


def test_experts_are_no_field_of_every_model_and_unknown_where_a_trajectory_does_not_tell() -> None:
    told = trajectory([1, 2], [3], [4], 1.0, "stop")
    experts = np.arange(3 * 2 * 2, dtype=np.int16).reshape(3, 2, 2)
    silent = trajectory([7], [8], [5], 0.5, "stop")
    batch = pack_trajectories([[silent], [replace(told, routed_experts=experts)]], episodes=["a", "b"])
    assert set(batch.to_packed().fields) == {"rollout_logprobs"}
    replayed = batch.routed_experts
    assert replayed is not None and (replayed[:2] == -1).all() and np.array_equal(replayed[2:], experts)
    assert pack_trajectories([[silent]], episodes=["a"]).routed_experts is None
    both = [replace(told, routed_experts=experts), replace(told, routed_experts=experts + 1)]
    replayed = pack_trajectories([both], episodes=["a"]).routed_experts
    assert replayed is not None and np.array_equal(replayed, np.concatenate([experts, experts + 1]))


def test_a_sampled_token_that_is_not_trained_is_no_part_of_the_prompt() -> None:
    sampled = trajectory([1, 2], [3, 4], [0, 1], 1.0, "stop")
    masked = replace(sampled, loss_mask=np.array([False, False, False, True]))
    assert pack_trajectories([[masked]], episodes=["a"]).prompt_lens.tolist() == [2]


def test_minibatches_cover_every_sequence_once_and_differ_by_one_at_most() -> None:
    parts = split_minibatches(10, 4, seed=3)
    assert sorted(i for part in parts for i in part) == list(range(10))
    assert {len(part) for part in parts} == {2, 3}
    assert len(split_minibatches(2, 4, seed=0)) == 2
