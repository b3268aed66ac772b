"""Rewards as people write them: several with weights, results with figures, and the signatures of TRL and verl."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from core.data.rollout_batch import pack_trajectories
from rollout.plugins import PluginError
from rollout.rewards.load import add_tasks, check_reward, join_spec, load_reward, split_spec
from rollout.rewards.pool import RewardPool
from rollout.trajectories import TrajectoryBuilder
from rollout.types import Completion, Prompt, Score

FUNCTIONS = """
def exact(prompt, text):
    return text in prompt.answers

def short(prompt, text):
    return {"score": 1.0 / len(text), "chars": len(text), "note": "ignored"}

def nothing(prompt, text):
    return None

def trl(completions, level, answer, **columns):
    assert columns["prompts"] == ["2+2="]
    return [float(c == a) * l for c, a, l in zip(completions, answer, level)]

def trl_messages(prompts, completions):
    return [float(c[0]["content"] == "4" and p[0]["role"] == "user") for p, c in zip(prompts, completions)]

def trl_column(completions, difficulty):
    return [0.0]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "level": extra_info["level"], "is_sum": data_source == "sums"}

def without_score(prompt, text):
    return {"reward": 1.0}

def wrong(text):
    return 0.0
"""


def prompt(**meta: object) -> Prompt:
    return Prompt(
        query_id="q", index=0, task="sums", text="2+2=", token_ids=np.array([1]), solutions=(r"\boxed{4}",), meta=meta
    )


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "people.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)


def judged(spec: str, text: str, **meta: object) -> tuple[float, dict[str, float]]:
    score = load_reward(spec)(prompt(**meta), text)
    return float(score), dict(score.parts)


def test_a_spec_is_one_text_and_back() -> None:
    assert join_spec(["math"], None) == "math"
    spec = join_spec(["a.b:c", "math", "d:e"], [0.5, 1.0, -2e-05])
    assert split_spec(spec) == [(0.5, "a.b:c"), (1.0, "math"), (-2e-05, "d:e")]
    assert split_spec(join_spec(["a.b:c", "d:e"], [0.1234567, 1e20])) == [(0.1234567, "a.b:c"), (1e20, "d:e")]


def test_several_rewards_are_added_by_weight_and_each_is_a_part() -> None:
    assert judged("people:exact + 0.5*people:short", "4") == (1.5, {"exact": 1.0, "short": 1.0, "chars": 1.0})
    assert judged("math + 2*people:exact", "5") == (-1.0, {"math": -1.0, "exact": 0.0})
    assert judged("math + people:exact", "?")[0] == -1.0, "what cannot be parsed is wrong, and the others count"


def test_rows_of_a_task_have_a_function_of_their_own() -> None:
    spec = add_tasks("math", {"game": "people:short", "sums": "0.5*people:exact + people:exact"})
    check_reward(spec)
    reward = load_reward(spec)
    assert reward(replace(prompt(), task="game"), "abcd") == 0.25
    assert reward(replace(prompt(), task="sums"), "4") == 1.5
    assert reward(replace(prompt(), task="other"), "\\boxed{4}") == 1.0
    assert split_spec(spec) == [(1.0, "math")]
    with pytest.raises(PluginError, match="unknown reward 'maths'"):
        check_reward(add_tasks("math", {"game": "maths"}))


def test_a_part_of_none_does_not_count_and_none_alone_is_an_error() -> None:
    assert judged("people:exact + people:nothing", "4") == (1.0, {"exact": 1.0})
    with pytest.raises(ValueError, match="returned None; a reward is a number"):
        judged("people:nothing", "4")


def test_a_result_with_figures_has_the_key_score() -> None:
    assert judged("people:short", "1234") == (0.25, {"chars": 4.0})
    with pytest.raises(ValueError, match="without 'score', which is the reward: reward"):
        judged("people:without_score", "4")


def test_functions_of_trl_get_lists_and_the_columns_that_they_ask_for() -> None:
    assert judged("people:trl", "4", level=3) == (3.0, {})
    chat = [{"role": "user", "content": "2+2="}]
    assert judged("people:trl_messages", "4", messages=chat) == (1.0, {})
    with pytest.raises(ValueError, match="asks for difficulty; the data set has .*level"):
        judged("people:trl_column", "4", level=3)


def test_functions_of_verl_get_their_arguments() -> None:
    assert judged("people:verl", "4", level=2, data_source="sums") == (1.0, {"level": 2.0, "is_sum": 1.0})


def test_a_spec_is_checked_before_the_start() -> None:
    for spec in ("people:exact + 0.5*people:short", "people:trl", "people:verl", "math"):
        check_reward(spec)
    for spec, says in (
        ("people:exact + people:shrot", "did you mean 'short'?"),
        ("people:wrong", r"is called as \(prompt, text\), its signature is \(text\)"),
        ("maths", "unknown reward 'maths'"),
        ("0.5*", "write names as"),
    ):
        with pytest.raises(PluginError, match=says):
            check_reward(spec)


def test_parts_reach_the_metrics_of_a_step() -> None:
    async def scores() -> list[float]:
        async with RewardPool("people:exact + 0.5*people:short", num_workers=1) as pool:
            return await pool.score_many(prompt(), ["4", "12"])

    rewards = asyncio.run(scores())
    assert rewards == [1.5, 0.25] and all(isinstance(reward, Score) for reward in rewards)
    completion = Completion(
        token_ids=np.array([1], np.int32), logprobs=np.zeros(1, np.float32), versions=np.zeros(1, np.int32),
        finish_reason="stop",
    )  # fmt: skip
    group = [
        TrajectoryBuilder(prompt(), number=i).sampled(completion).build(reward) for i, reward in enumerate(rewards)
    ]
    figures = pack_trajectories([group], episodes=["s/q/0"]).workflow_figures()
    assert (figures["reward/exact/mean"], figures["reward/short/min"], figures["reward/chars/max"]) == (0.5, 0.5, 2.0)
