"""The search of `python -m tools.bench cpu --only time_to_accuracy`."""

import itertools
import json
import math
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout.types import Prompt
from tools.bench.against_trl import accuracy
from tools.bench.reward import exact_reward


def setting(precision: str, lr: float, temperature: float = 1.0, algorithm: str = "grpo") -> accuracy.Setting:
    return accuracy.Setting(precision=precision, lr=lr, temperature=temperature, algorithm=algorithm)


def test_each_side_is_measured_on_all_seeds_with_the_best_of_its_own_settings() -> None:
    calls: list[list[tuple[accuracy.Setting, int]]] = [[], []]

    def side(number: int, best: accuracy.Setting) -> accuracy.Measure:
        def measure(tried: accuracy.Setting, seed: int) -> float:
            calls[number].append((tried, seed))
            if tried.precision != best.precision:
                return math.inf
            wrong = [getattr(tried, name) != getattr(best, name) for name in ("lr", "temperature", "algorithm")]
            return 10.0 * (number + 1) + seed + 5 * sum(wrong)

        return measure

    first, second = setting("float32", 1e-4, 1.0, "maxrl"), setting("bfloat16", 2e-4, 0.8, "grpo")
    found = accuracy.compare([(side(0, first), accuracy.ON_CPU), (side(1, second), accuracy.PEER_ON_CPU)])
    assert found == [12.0, 22.0]
    for number, best in ((0, first), (1, second)):
        searched, measured = calls[number][:-3], calls[number][-3:]
        precision, lr = best.precision, best.lr
        assert searched == [
            (tried, 1)
            for tried in (
                setting("float32", 1e-4),
                setting("bfloat16", 1e-4),
                setting(precision, 5e-5),
                setting(precision, 2e-4),
                setting(precision, lr, 1.0, ("maxrl", "dr_grpo")[number]),
                setting(precision, lr, 0.8),
                setting(precision, lr, 0.8, ("maxrl", "dr_grpo")[number]),
            )
        ]
        assert measured == [(best, seed) for seed in (1, 2, 3)]


def test_the_baseline_reports_the_seconds_of_its_first_evaluation_at_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[str]] = []

    def output_of(command: list[str], limit: float) -> str:
        commands.append(command)
        curve = {"eval_steps": [0, 10, 20], "accuracies": [0.4, 0.7, 0.81 if command[-1] == "1" else 0.79]}
        return f"noise\n{json.dumps({**curve, 'eval_seconds': [0, 3, 6]})}\n"

    monkeypatch.setattr(accuracy, "output_of", output_of)
    arguments = (Path("python"), Path("warm"), Path("model"), setting("float32", 2e-4, 0.8, "dr_grpo"))
    assert accuracy.theirs(*arguments, 1) == 6
    assert accuracy.theirs(*arguments, 2) == math.inf
    given = dict(itertools.pairwise(commands[0]))
    assert (given["--target"], given["--precision"], given["--lr"]) == ("0.8", "float32", "0.0002")
    assert (given["--temperature"], given["--algorithm"]) == ("0.8", "dr_grpo")


@pytest.mark.parametrize(
    ("algorithm", "loss"), [("grpo", {}), ("dr_grpo", {"loss_type": "dr_grpo", "scale_rewards": "none"})]
)
def test_the_baseline_trains_with_the_setting_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, loss: dict[str, str]
) -> None:
    """With stand-ins for TRL and datasets, which this environment does not have, and without a model."""
    configured: list[dict[str, Any]] = []

    class Trainer:
        def __init__(self, *, args: dict[str, Any], **_: Any) -> None:
            configured.append(args)

        def train(self) -> None: ...

    modules = {
        "trl": {"GRPOConfig": lambda **given: given, "GRPOTrainer": Trainer},
        "datasets": {"Dataset": SimpleNamespace(from_list=list)},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda folder: None)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "solutions": ["\\boxed{2}"]}) + "\n")
    command = ["accuracy.py", "--model", "model", "--train", str(rows), "--held-out", str(rows)]
    command += ["--temperature", "0.8", "--algorithm", algorithm, "--lr", "5e-05", "--precision", "bfloat16"]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path("tools/bench/trl/accuracy.py", run_name="__main__")
    (config,) = configured
    assert (config["temperature"], config["learning_rate"], config["bf16"]) == (0.8, 5e-5, True)
    assert {name: config[name] for name in ("loss_type", "scale_rewards") if name in config} == loss


def test_the_reward_is_one_for_the_exact_sum_alone() -> None:
    prompt = Prompt(
        query_id="47+58", index=0, task="math", text="47+58=", token_ids=np.array([2]), solutions=("\\boxed{105}",)
    )
    assert [exact_reward(prompt, text) for text in ("105", " 105", "1050", "x105", "")] == [1.0, 1.0, -1.0, -1.0, -1.0]


@pytest.mark.parametrize("searches", [(accuracy.ON_CPU, accuracy.PEER_ON_CPU), (accuracy.ON_GPU, accuracy.PEER_ON_GPU)])
def test_both_sides_try_equally_many_settings_and_the_same_seeds(searches: tuple[accuracy.Search, ...]) -> None:
    tried: list[list[int]] = [[], []]

    def side(number: int) -> accuracy.Measure:
        def measure(_: accuracy.Setting, seed: int) -> float:
            tried[number].append(seed)
            return 1.0

        return measure

    accuracy.compare(list(zip((side(0), side(1)), searches, strict=True)))
    assert tried[0] == tried[1] and tried[0][-3:] == [1, 2, 3]
