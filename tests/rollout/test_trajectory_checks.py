"""Malformed trajectories are refused where they enter the run, with the field, the value and the rule."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.simulated_sampling import make_prompts, trajectory
from rollout.types import Completion, Trajectory
from rollout.workflow_calls import GroupLimits, check_group, check_sampled
from rollout.workflows import TrajectoryBuilder

(PROMPT,) = make_prompts(1)
GOOD = trajectory(PROMPT, np.array([2, 3]))
"""Prompt tokens 0 and 1, sampled tokens 2 and 3 of versions 2 and 3."""
LIMITS = GroupLimits(group_size=2, vocab_size=272, max_tokens=8)


def check(*group: Trajectory, version: int = 3) -> list[Trajectory]:
    return check_group(list(group), PROMPT, version=version, limits=LIMITS)


def with_entry(name: str, index: int, value: float) -> dict[str, Any]:
    changed = getattr(GOOD, name).copy()
    changed[index] = value
    return {name: changed}


def test_a_good_group_passes_as_it_is() -> None:
    group = [GOOD, replace(GOOD, reward=True), replace(GOOD, **with_entry("rollout_logprobs", 3, 1e-3))]
    assert check_group(group, PROMPT, version=3, limits=LIMITS) is group
    assert check_group(group, PROMPT, version=3, limits=GroupLimits()) is group


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward": float("nan")}, "reward=nan must be a finite number of float32"),
        ({"reward": float("inf")}, "reward=inf must be a finite"),
        ({"reward": np.float16("inf")}, "reward=inf must be a finite"),
        ({"reward": 1e308}, "reward=1e+308 must be a finite"),
        ({"finish_reason": "abort"}, "finish_reason='abort' must be 'stop' or 'length'"),
        ({"loss_mask": np.zeros(4, bool)}, "loss_mask is True for no token: there is nothing to train"),
        ({"loss_mask": np.ones(4, bool)}, "loss_mask is True for the first token"),
        ({"loss_mask": np.ones(4, bool), "versions": np.full(4, 2)}, "loss_mask is True for the first token"),
        (with_entry("token_ids", 3, 272), "token_ids[3]=272 is outside 0..271, the vocabulary of the model (1 of 4"),
        (with_entry("token_ids", 0, -1), "token_ids[0]=-1 is outside 0..271"),
        (with_entry("rollout_logprobs", 2, float("nan")), "rollout_logprobs[2]=nan is not finite (1 of 4 tokens)"),
        (with_entry("rollout_logprobs", 0, float("-inf")), "rollout_logprobs[0]=-inf is not finite"),
        (with_entry("rollout_logprobs", 3, 50.0), "rollout_logprobs[3]=50.0 is above 0"),
        (with_entry("versions", 3, 99), "versions[3]=99 is newer than the weights, 3"),
        (with_entry("versions", 3, 4), "versions[3]=4 is newer than the weights, 3"),
        (with_entry("versions", 2, -1), "versions[2]=-1 is of a token that loss_mask trains"),
    ],
)
@pytest.mark.parametrize("others", [[GOOD], [GOOD, trajectory(PROMPT, np.full(5000, 3))]], ids=["short", "long"])
def test_an_impossible_value_is_refused_with_its_field(change, said, others) -> None:
    group = [*others, replace(GOOD, **change)]
    limits = replace(LIMITS, max_tokens=None)
    with pytest.raises(ValueError, match=re.escape(f"q0, trajectory {len(others)}: {said}")):
        check_group(group, PROMPT, version=3, limits=limits)
    assert check_group(others * 2, PROMPT, version=3, limits=limits) == others * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward": None}, "reward must be a number, not None"),
        ({"loss_mask": np.array([0, 0, 1, 1])}, "loss_mask must be an array of booleans, not of int64"),
        ({"token_ids": np.zeros(4)}, "token_ids must be an array of integers, not of float64"),
        ({"token_ids": [1, 2]}, "token_ids must be an array of 0 entries, one per token, not [1, 2]"),
        ({"rollout_logprobs": np.zeros(3, np.float32)}, "rollout_logprobs must be an array of 4 entries"),
        ({"versions": np.zeros(3)}, "versions must be an array of 4 entries, one per token, not array([0., 0., 0.])"),
        ({"metrics": {"turns": "3"}}, "metrics['turns'] must be a number, not '3'"),
    ],
)
def test_a_wrong_type_is_refused_with_its_field(change: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"q0, trajectory 0: {said}")):
        check(replace(GOOD, **change), GOOD)


def test_an_empty_trajectory_and_too_few_rollouts_are_refused() -> None:
    empty = {name: getattr(GOOD, name)[:0] for name in ("token_ids", "loss_mask", "rollout_logprobs", "versions")}
    with pytest.raises(ValueError, match="loss_mask is True for no token"):
        check(replace(GOOD, **empty), GOOD)
    with pytest.raises(ValueError, match="loss_mask is True for no token"):
        check(GOOD, replace(GOOD, **empty))
    with pytest.raises(ValueError, match="q0: the workflow returned 1 rollouts, group_size=2 are needed"):
        check(GOOD)
    branches = [replace(GOOD, rollout=0)] * 3
    with pytest.raises(ValueError, match="q0: the workflow returned 1 rollouts in 3 trajectories, group_size=2 are"):
        check(*branches)
    assert len(check(*branches, replace(GOOD, rollout=1))) == 4


def test_a_trajectory_that_is_too_long_is_cut_after_the_last_turn_that_fits() -> None:
    sampled = [3, 3, 3, -1, -1, 3, 3, 3, 3]  # 2 prompt tokens, 3 sampled, 2 of a tool, 4 sampled
    long = trajectory(PROMPT, np.array(sampled))
    long = replace(
        long,
        token_ids=np.arange(11, dtype=np.int32),
        loss_mask=np.array([False, False, *(v >= 0 for v in sampled)]),
        routed_experts=np.zeros((11, 1, 1), np.int16),
        metrics={"turns": 2.0},
    )
    for max_tokens, end in ((11, 11), (10, 5), (5, 5), (4, 4)):
        [cut, other] = check_group([long, GOOD], PROMPT, version=3, limits=GroupLimits(max_tokens=max_tokens))
        assert other is GOOD
        assert cut.token_ids.tolist() == list(range(end)) and len(cut.routed_experts) == end
        assert {len(a) for a in (cut.loss_mask, cut.rollout_logprobs, cut.versions)} == {end}
        assert cut.metrics == ({"turns": 2.0} if end == 11 else {"turns": 2.0, "cut_tokens": 11.0 - end})
        assert cut.finish_reason == ("stop" if end == 11 else "length")
    with pytest.raises(ValueError, match="loss_mask is True for no token"):
        check_group([long, GOOD], PROMPT, version=3, limits=GroupLimits(max_tokens=2))


def test_trained_tokens_are_those_that_were_sampled_with_their_log_probabilities() -> None:
    def completion(tokens: list[int], logprob: float) -> Completion:
        n = len(tokens)
        return Completion(
            token_ids=np.array(tokens, np.int32), logprobs=np.full(n, logprob, np.float32),
            versions=np.full(n, 3, np.int32), finish_reason="stop",
        )  # fmt: skip

    turns = completion([5, 6, 7], -0.5), completion([8, 9], -0.25)
    two = TrajectoryBuilder(PROMPT, number=0).sampled(turns[0]).observed([1, 2]).sampled(turns[1]).build(1.0)
    adjacent = TrajectoryBuilder(PROMPT, number=1).sampled(turns[0]).sampled(turns[1]).build(1.0)
    part = replace(two, loss_mask=two.loss_mask & (np.arange(9) != 4))
    check_sampled([two, adjacent, part], turns, PROMPT)

    token_ids, logprobs = two.token_ids.copy(), two.rollout_logprobs.copy()
    token_ids[3], logprobs[8] = 60, -0.5
    mask = two.loss_mask | (np.arange(9) == 5)
    for edited, said in (
        (replace(two, token_ids=token_ids), "token_ids[3]=60 is trained, but no generator sampled it"),
        (replace(two, rollout_logprobs=logprobs), "token_ids[8]=9 is trained"),
        (replace(two, loss_mask=mask), "token_ids[5]=1 is trained"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"q0, trajectory 1: {said}")):
            check_sampled([two, edited], turns, PROMPT)
