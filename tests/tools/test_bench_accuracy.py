"""The search of `python -m tools.bench cpu --only time_to_accuracy`."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from rollout.types import Prompt
from tools.bench.against_trl import accuracy
from tools.bench.reward import exact_reward


def test_each_side_is_measured_on_all_seeds_with_the_best_of_its_own_settings() -> None:
    calls: list[list[tuple[float, str, int]]] = [[], []]

    def side(number: int, best: tuple[float, str]) -> accuracy.Measure:
        def measure(lr: float, precision: str, seed: int) -> float:
            calls[number].append((lr, precision, seed))
            if precision != best[1]:
                return math.inf
            return 10.0 * (number + 1) + seed + (0 if lr == best[0] else 5)

        return measure

    plan = accuracy.ON_CPU
    found = accuracy.compare([(side(0, (1e-4, "float32")), plan), (side(1, (2e-4, "bfloat16")), plan)])
    assert found == [12.0, 22.0]
    for number, best in ((0, (1e-4, "float32")), (1, (2e-4, "bfloat16"))):
        searched, measured = calls[number][:-3], calls[number][-3:]
        assert searched[:2] == [(1e-4, "float32", 1), (1e-4, "bfloat16", 1)]
        assert searched[2:] == [(5e-5, best[1], 1), (2e-4, best[1], 1)]
        assert measured == [(*best, seed) for seed in (1, 2, 3)]


def test_the_baseline_reports_the_seconds_of_its_first_evaluation_at_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[str]] = []

    def output_of(command: list[str], limit: float) -> str:
        commands.append(command)
        curve = {"eval_steps": [0, 10, 20], "accuracies": [0.4, 0.7, 0.81 if command[-1] == "1" else 0.79]}
        return f"noise\n{json.dumps({**curve, 'eval_seconds': [0, 3, 6]})}\n"

    monkeypatch.setattr(accuracy, "output_of", output_of)
    arguments = (Path("python"), Path("warm"), Path("model"), 2e-4, "float32")
    assert accuracy.theirs(*arguments, 1) == 6
    assert accuracy.theirs(*arguments, 2) == math.inf
    assert commands[0][commands[0].index("--target") + 1] == "0.8" and "--precision" in commands[0]


def test_the_reward_is_one_for_the_exact_sum_alone() -> None:
    prompt = Prompt(
        query_id="47+58", index=0, task="math", text="47+58=", token_ids=np.array([2]), solutions=("\\boxed{105}",)
    )
    assert [exact_reward(prompt, text) for text in ("105", " 105", "1050", "x105", "")] == [1.0, 1.0, -1.0, -1.0, -1.0]


@pytest.mark.parametrize("searches", [(accuracy.ON_CPU, accuracy.ON_CPU), (accuracy.ON_GPU, accuracy.PEER_ON_GPU)])
def test_both_sides_try_equally_many_settings_and_the_same_seeds(searches: tuple[accuracy.Search, ...]) -> None:
    tried: list[list[tuple[float, str, int]]] = [[], []]

    def side(number: int) -> accuracy.Measure:
        return lambda lr, precision, seed: tried[number].append((lr, precision, seed)) or 1.0  # type: ignore[func-returns-value]

    accuracy.compare(list(zip((side(0), side(1)), searches, strict=True)))
    assert len(tried[0]) == len(tried[1]) and [s for *_, s in tried[0]] == [s for *_, s in tried[1]]
