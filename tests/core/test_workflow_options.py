"""workflow.type, by_task and options select the workflow of each task, checked before the start."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from core.checks.rules import load_config
from core.config.runtime import WorkflowConfig
from core.explore.workflow import check_workflows, workflow_choice
from rollout.types import SamplingParams
from rollout.workflows import SingleTurnMathWorkflow, make_workflow

MODULE = """
from slipstream import Section, key

class Plain:
    def __init__(self, *, tokenizer, reward_pool, sampling, group_size, seed):
        pass
    async def run(self, prompt, generator):
        return ["plain"]

class Game:
    class Config(Section):
        max_turns: int = key(3, "Turns", ge=1)
        name: str = key("chess", "Name")
    def __init__(self, *, tokenizer, reward_pool, sampling, group_size, seed, options):
        self.options = options
    async def run(self, prompt, generator):
        return [self.options.name, self.options.max_turns]

class Tool(Game):
    class Config(Section):
        name: str = key("bash", "Name")
        path: str = key("/bin", "Path")
    async def run(self, prompt, generator):
        return [self.options.name, self.options.path]

class TakesNone(Game):
    def __init__(self, *, tokenizer, reward_pool, sampling, group_size, seed):
        pass
"""
SETTINGS: dict[str, Any] = {
    "tokenizer": None, "reward_pool": None, "sampling": SamplingParams(max_new_tokens=1), "group_size": 1, "seed": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_workflows.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def problems(**keys: Any) -> list[str]:
    return [f"{p.key}: {p.message}" for p in check_workflows(WorkflowConfig(**keys), {})]


def test_options_reach_the_workflow_as_its_class_declares_them() -> None:
    config = WorkflowConfig(type="own_workflows:Game", options={"max_turns": "5"})
    workflow: Any = make_workflow(workflow_choice(config), **SETTINGS)
    assert (workflow.options.max_turns, workflow.options.name) == (5, "chess")
    assert problems(type="own_workflows:Game") == problems() == []


@pytest.mark.parametrize(
    ("written", "read"),
    [("[python, own_tools:add]", ["python", "own_tools:add"]), ("[1, 2]", [1, 2]), ("5", 5), ("a", "a")],
)
def test_an_option_on_the_command_line_may_be_a_list(written: str, read: object) -> None:
    given = ["experiment_name=e", "trial_name=t", "actor.path=m", "dataset.path=d", "ppo.disable_value=true"]
    loaded = load_config("ppo-math", None, [*given, "workflow.type=tools", f"workflow.options.tools={written}"])
    assert loaded.config.workflow.options == {"tools": read}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"type": "own_workflows:Game", "options": {"max_turn": 1}},
         "workflow.options.max_turn: unknown key; did you mean 'workflow.options.max_turns'?"),
        ({"type": "own_workflows:Game", "options": {"max_turns": 0}}, "workflow.options.max_turns: must be"),
        ({"type": "own_workflows:Game", "options": {"max_turns": "x"}},
         "workflow.options.max_turns: must be an integer, got 'x'"),
        ({"options": {"a": 1}}, "workflow.options: a: math has no options; they are the fields of its class Config"),
        ({"by_task": {"game": "own_workflows:Gam"}}, "workflow.by_task.game: workflow own_workflows:Gam: module"),
        ({"type": "mth"}, "workflow.type: unknown workflow 'mth'; use one of endpoint, environment, math"),
        ({"type": "own_workflows:TakesNone"}, "workflow.type: workflow own_workflows:TakesNone: is called as"),
        ({"by_task": {"a": "own_workflows:Game", "b": "own_workflows:Tool"}, "options": {"size": 1}},
         "workflow.options.size: unknown key; keys are max_turns, name, path"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_problem_with_its_key(keys: dict[str, Any], said: str) -> None:
    [problem] = problems(**keys)
    assert problem.startswith(said)


def test_the_task_of_a_prompt_selects_its_workflow() -> None:
    class WithTask:
        def __init__(self, task: str) -> None:
            self.task = task

    by_task = {"game": "own_workflows:Game", "tool": "own_workflows:Tool"}
    config = WorkflowConfig(type="own_workflows:Plain", by_task=by_task, options={"name": "go", "path": "/usr"})
    workflow: Any = make_workflow(workflow_choice(config), **SETTINGS)
    answers = {task: asyncio.run(workflow.run(WithTask(task), None)) for task in ("game", "tool", "math")}
    assert answers == {"game": ["go", 3], "tool": ["go", "/usr"], "math": ["plain"]}
    assert isinstance(make_workflow(workflow_choice(WorkflowConfig()), **SETTINGS), SingleTurnMathWorkflow)
