"""Credit for turns: against formulas written as plain loops, and the same for any order and packing of groups."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from core.data.rollout_batch import RolloutBatch, pack_trajectories
from helpers.batches import algorithm
from rollout.trajectories import TrajectoryBuilder
from rollout.types import Completion, Prompt, Trajectory
from rollout.workflow_calls import GroupLimits, check_group

PROMPT = Prompt(query_id="q", index=0, task="t", text="?", token_ids=np.array([1, 2], np.int32), solutions=())
STATES = ("kitchen", "hall", "garden", None)


def conversation(rng: np.random.Generator, *, reports: bool = True) -> Trajectory:
    """One to four turns of one to three tokens, with a reward and a state each."""
    sample = TrajectoryBuilder(PROMPT, number=int(rng.integers(1000)))
    total = float(rng.normal())
    for _ in range(rng.integers(1, 5)):
        n = int(rng.integers(1, 4))
        sampled = np.arange(n, dtype=np.int32)
        completion = Completion(
            token_ids=sampled, logprobs=np.full(n, -1, np.float32), versions=np.zeros(n, np.int32), finish_reason="stop"
        )
        reward = float(np.float32(rng.normal()))
        total += reward
        sample.sampled(completion, reward=reward, state=STATES[rng.integers(4)]) if reports else sample.sampled(
            completion
        )
        sample.observed([7] * int(rng.integers(1, 3)))
    return sample.build(float(np.float32(total)))


def groups(num_groups: int = 4, **options: Any) -> list[list[Trajectory]]:
    rng = np.random.default_rng(1)
    return [[conversation(rng, **options) for _ in range(3)] for _ in range(num_groups)]


def advantages(batch: RolloutBatch, **settings: Any) -> torch.Tensor:
    chosen = algorithm("grpo", **settings)
    mask = torch.tensor(batch.loss_mask)
    values = torch.linspace(-1, 1, len(mask)).sin() * mask
    fields = {"loss_mask": mask, "rollout_logprobs": torch.tensor(batch.rollout_logprobs), "old_values": values}
    return chosen.advantages(batch, fields)[0]["advantages"]


def packed(made: list[list[Trajectory]]) -> RolloutBatch:
    return pack_trajectories(made, [str(i) for i in range(len(made))])


def turns_of(t: Trajectory) -> list[list[int]]:
    """Places of the tokens of each turn."""
    found: list[list[int]] = []
    for place in np.flatnonzero(t.loss_mask).tolist():
        if found and found[-1][-1] == place - 1:
            found[-1].append(place)
        else:
            found.append([place])
    return found


def rewards_of(t: Trajectory) -> list[float]:
    rewards = list(t.turn_rewards or [])
    rewards[-1] += t.reward - sum(rewards)
    return rewards


def spread(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1)) + 1e-6


def expected(made: list[list[Trajectory]], credit: str) -> list[float]:
    out: list[float] = []
    for group in made:
        outcomes = [t.reward for t in group]
        every = [r for t in group for r in rewards_of(t)]
        returns = [
            [sum(0.5 ** (j - k) * r for j, r in enumerate(rewards_of(t)) if j >= k) for k in range(len(turns_of(t)))]
            for t in group
        ]
        for i, t in enumerate(group):
            row = [0.0] * len(t.token_ids)
            for k, places in enumerate(turns_of(t)):
                if credit == "turn_rewards":
                    a = sum((r - sum(every) / len(every)) / spread(every) for r in rewards_of(t)[k:])
                else:
                    state = (t.turn_states or [])[k]
                    same = [
                        returns[j][m]
                        for j, other in enumerate(group)
                        for m, s in enumerate(other.turn_states or [])
                        if state is not None and s == state
                    ] or [returns[i][k]]
                    a = (t.reward - sum(outcomes) / len(outcomes)) / spread(outcomes)
                    a += 2.0 * (returns[i][k] - sum(same) / len(same)) / spread(same)
                for place in places:
                    row[place] = a
            out += row
    return out


@pytest.mark.parametrize("credit", ["turn_rewards", "step_groups"])
def test_turns_are_credited_by_the_formula(credit: str) -> None:
    made = groups()
    found = advantages(packed(made), credit=credit, turn_weight=2.0, turn_discount=0.5)
    torch.testing.assert_close(found, torch.tensor(expected(made, credit)), rtol=1e-4, atol=1e-4)


def test_gae_takes_turns_as_its_steps() -> None:
    made = groups()
    batch = packed(made)
    options = {"advantage": "gae", "disable_value": False, "discount": 0.9, "gae_lambda": 0.8}
    found = advantages(batch, credit="turn_gae", **options)
    values = torch.linspace(-1, 1, len(batch.token_ids)).sin()
    for t, start in zip([t for group in made for t in group], batch.cu_seqlens.tolist(), strict=False):
        turns, rewards, running = turns_of(t), rewards_of(t), 0.0
        for k in reversed(range(len(turns))):
            following = float(values[start + turns[k + 1][0]]) if k + 1 < len(turns) else 0.0
            running = rewards[k] + 0.9 * following - float(values[start + turns[k][0]]) + 0.9 * 0.8 * running
            for place in turns[k]:
                assert float(found[start + place]) == pytest.approx(running, abs=1e-4)


@pytest.mark.parametrize("credit", ["turn_rewards", "step_groups"])
def test_a_group_has_the_same_advantages_in_any_batch_and_order(credit: str) -> None:
    made = groups()
    whole = advantages(packed(made), credit=credit)
    alone = [advantages(packed([group]), credit=credit) for group in made]
    torch.testing.assert_close(whole, torch.cat(alone), rtol=1e-5, atol=1e-6)
    turned = advantages(packed(made[::-1]), credit=credit)
    torch.testing.assert_close(turned, torch.cat(alone[::-1]), rtol=1e-5, atol=1e-6)


def test_turns_are_counted_where_a_workflow_appends_them_and_where_a_group_is_checked() -> None:
    def done(n: int) -> Completion:
        return Completion(
            token_ids=np.ones(n, np.int32), logprobs=np.zeros(n, np.float32), versions=np.zeros(n, np.int32),
            finish_reason="stop",
        )  # fmt: skip

    sample = TrajectoryBuilder(PROMPT, number=0).sampled(done(2), reward=1.0, state="a").sampled(done(1), reward=2.0)
    sample.observed([3]).sampled(done(0), reward=9.0).sampled(done(2)).observed([4]).sampled(done(3), state="b")
    t = sample.build(12.0)
    assert (t.turn_rewards, [s is None for s in t.turn_states or ()]) == ([3.0, 0.0, 0.0], [False, True, False])
    [cut] = check_group([t], PROMPT, version=0, limits=GroupLimits(max_tokens=9))
    assert (len(cut.token_ids), cut.turn_rewards) == (8, [3.0, 0.0])
    object.__setattr__(t, "turn_rewards", [1.0])
    with pytest.raises(TypeError, match="turn_rewards has 1 entries, loss_mask has 3 turns"):
        check_group([t], PROMPT, version=0, limits=GroupLimits())
