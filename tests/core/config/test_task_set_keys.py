"""Sets of prompts with settings of their own: what each has of the run, and how each is checked."""

import json
from pathlib import Path

import pytest

from core.checks.rules import load_config
from core.config.experiments import PPOMATHConfig
from core.config.parsing.problems import ConfigError
from helpers.config_inputs import problems, write_run

NO_PATH = "dataset.path=''"
OWN = "helpers.rewards:length"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def config_of(run: Path, *overrides: str) -> PPOMATHConfig:
    config = load_config("ppo-math", run, overrides).config
    assert isinstance(config, PPOMATHConfig)
    return config


def sets(**of: str) -> str:
    return f"{{{', '.join(f'{name}: {{{keys}}}' for name, keys in of.items())}}}"


def test_a_set_with_a_reward_of_its_own_has_the_threshold_of_that_reward(run: Path) -> None:
    own = {"math": "path: x, reward: math", "own": f"path: x, reward: '{OWN}'"}
    given = {"given": f"path: x, reward: '{OWN}', right_at: 5"}
    words = ["reward.function=helpers.rewards:zero", "reward.right_at=0.5", "evaluation.path=held_out.jsonl"]
    words += [f"evaluation.sets={sets(**own, **given)}", NO_PATH, f"task_sets={sets(**own)}"]
    config = config_of(run, *words)
    thresholds = {name: one.right_at for name, one in config.evaluation_sets.items()}
    assert thresholds == {"held_out": 0.5, "math": 1.0, "own": None, "given": 5.0}
    assert {name: one.right_at for name, one in config.sets.items()} == {"math": 1.0, "own": None}


def test_sets_with_one_file_are_checked_each_by_its_own_settings(run: Path) -> None:
    file = run.parent / "unsolved.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "level": 1}) + "\n")
    data = f"path: {file}, order: curriculum, curriculum: "
    of = sets(first=f"{data}depth, reward: '{OWN}'", second=f"{data}level", third=f"{data}level, reward: '{OWN}'")
    first, second = problems(run, NO_PATH, f"task_sets={of}")
    assert "task_sets.first.path: " in first and "curriculum='depth' has no number or text here" in first
    assert "task_sets.second.path: " in second and "no solution among the columns" in second


def test_a_reward_that_cannot_be_read_is_one_problem(run: Path) -> None:
    (said,) = problems(run, "reward.function=a b")
    assert "reward.function: reward 'a b': write names as package.module:name" in said
    (said,) = problems(run, f"evaluation.sets={sets(hard=f'path: {run.parent}/prompts.jsonl, reward: a b')}")
    assert "evaluation.sets.hard.reward: reward 'a b': " in said


@pytest.mark.parametrize("section", ["task_sets", "evaluation.sets"])
def test_options_of_a_set_without_a_workflow_of_its_own_are_refused(run: Path, section: str) -> None:
    given = f"{section}={sets(one='path: x, workflow_options: {turns: 2}')}"
    with pytest.raises(ConfigError, match=rf"{section}.one.workflow_options: are options of a workflow of this set"):
        config_of(run, given, *([NO_PATH] if section == "task_sets" else []))


def test_a_held_out_file_and_a_set_of_its_name_are_both_evaluated(run: Path) -> None:
    given = config_of(run, "evaluation.path=hard.jsonl", f"evaluation.sets={sets(hard='path: other.jsonl')}")
    assert {name: one.path for name, one in given.evaluation_sets.items()} == {
        "hard-0": "hard.jsonl",
        "hard": "other.jsonl",
    }
