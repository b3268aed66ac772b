"""Functions of scripts and notebooks reach every process of a run, and no script starts itself again."""

import asyncio
import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import slipstream
from helpers.config_inputs import SMALLEST_PPO, write_run
from helpers.forks import programs
from rollout.plugins import ROOT, load_plugin
from rollout.rewards.math import extracted_answer
from rollout.rewards.pool import RewardPool
from rollout.types import Prompt
from rollout.workflows import SingleTurnMathWorkflow, check_workflow
from slipstream.api import import_path

PROMPT = Prompt(query_id="q", index=0, task="t", text="2+2=", token_ids=np.array([1]), solutions=("4",))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def python(code: str, folder: Path, *first: str) -> subprocess.CompletedProcess[str]:
    """Run `code` as a user's script train.py, or from the standard input with `first` = "-"."""
    (folder / "train.py").write_text(code)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    given = code if first else None
    command = [sys.executable, *(first or ["train.py"])]
    return subprocess.run(command, cwd=folder, env=env, input=given, capture_output=True, text=True, timeout=250)


def graded(bonus: float) -> Any:
    return lambda prompt, text: bonus + (text in prompt.answers)


class Judge:
    bonus = 0.5

    def __call__(self, prompt: Prompt, text: str) -> float:
        return self.bonus + (text in prompt.answers)

    def judge(self, prompt: Prompt, text: str) -> float:
        return self(prompt, text)


def with_bonus(prompt: Prompt, text: str, bonus: float) -> float:
    return bonus + (text in prompt.answers)


def scores(path: str) -> list[float]:
    async def score() -> list[float]:
        async with RewardPool(path, num_workers=1) as pool:
            return await pool.score_many(PROMPT, ["4", "5"])

    return asyncio.run(score())


OBJECTS = {
    "closure": graded(0.5), "lambda": lambda prompt, text: 0.5 + (text == "4"), "callable object": Judge(),
    "partial": functools.partial(with_bonus, bonus=0.5), "method": Judge().judge,
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_any_callable_is_a_reward(name: str) -> None:
    path = import_path(OBJECTS[name])
    reward = load_plugin(path, kind="reward", arguments=("prompt", "text"))
    assert reward is not OBJECTS[name] and [reward(PROMPT, text) for text in ("4", "5")] == [1.5, 0.5]
    assert import_path(OBJECTS[name]) == path, "a run that continues names the same module"


SCRIPT = """
from rollout.workflows import SingleTurnMathWorkflow, check_workflow
from slipstream.api import import_path

BONUS = 0.5

def helper(text):
    return BONUS + (text == "4")

def reward(prompt, text):
    return helper(text)

print(import_path(reward))
"""


@pytest.mark.parametrize("first", [(), ("-",)], ids=["script", "standard input"])
def test_a_function_of_a_script_or_an_interactive_session_arrives_with_what_it_uses(first, tmp_path) -> None:
    path = python(SCRIPT, tmp_path, *first).stdout.strip()
    assert path.startswith("reward_") and path.endswith(":reward")
    assert scores(path) == [1.5, 0.5]


def test_what_a_module_defines_is_named_where_it_is() -> None:
    assert import_path(extracted_answer) == "rollout.rewards.math:extracted_answer"
    assert import_path(SingleTurnMathWorkflow) == "rollout.workflows.single_turn:SingleTurnMathWorkflow"


def test_classes_of_a_script_are_workflows(tmp_path: Path) -> None:
    script = """
from rollout.workflows import SingleTurnMathWorkflow
from rollout.workflows import SingleTurnMathWorkflow, check_workflow
from slipstream.api import import_path

class Own(SingleTurnMathWorkflow):
    pass

print(import_path(Own))
"""
    check_workflow(python(script, tmp_path).stdout.strip())


def test_a_function_that_holds_a_lock_is_refused_with_the_way_out() -> None:
    lock = threading.Lock()
    with pytest.raises(ValueError, match="cannot be passed to the processes of a run .* create that in the function"):
        import_path(lambda prompt, text: float(lock.locked()))


def test_functions_in_a_mapping_arrive_too(tmp_path: Path) -> None:
    tree = yaml.safe_load(write_run(tmp_path, SMALLEST_PPO).read_text())
    changes = {"reward": {"function": Judge()}, "actor": {**tree["actor"], "path": Path(tree["actor"]["path"])}}
    config = slipstream.load_config({**tree, **changes, "ppo.kl_ctl": np.float32(0.5)})
    assert config.reward.function.startswith("Judge_") and config.ppo.kl_ctl == 0.5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_training_from_python_uses_the_workflow_of_the_caller_and_passes_each_step_on(tmp_path, monkeypatch) -> None:
    class Praising(SingleTurnMathWorkflow):
        async def run(self, prompt: Prompt, generator: Any) -> list[Any]:
            return [replace(t, reward=0.25) for t in await super().run(prompt, generator)]

    def forked(module: str, words: list[str], *, meanwhile: Sequence[Callable[[], object]]) -> int:
        """As slipstream.api._run, without imports of its own."""
        with open(tmp_path / "output", "wb") as output:
            program = programs.start(["-m", module, *words], output=output)
        while program.poll() is None:
            time.sleep(0.1)
        for call in meanwhile:
            call()
        return program.wait()

    monkeypatch.setattr("slipstream.api._run", forked)
    files = slipstream.make_demo_data(tmp_path, seed=1)
    seen: list[dict[str, float]] = []
    config = {
        "experiment_name": "own", "actor.path": files.model, "dataset.path": files.train, "dataset.max_prompt_len": 8,
        "dataset.train_bs_n_seqs": 4, "group_size": 2, "allocation_mode": "mock.d1m1p1", "n_gpus_per_node": 1,
        "ppo": {"gen": {"max_new_tokens": 4}, "ppo_n_minibatches": 1, "kl_ctl": 0.0, "disable_value": True},
        "exp_ctrl.total_train_steps": 2, "reward.num_workers": 1, "launch.threads_per_process": 1,
        "external_configs.cluster_config.fileroot": tmp_path,
    }  # fmt: skip
    run = slipstream.train(config, on_step=seen.append, **{"workflow.type": Praising})
    assert [(row["step"], row["reward/mean"]) for row in seen] == [(1, 0.25), (2, 0.25)]
    assert seen == run.metrics() and run.samples()[-1].reward == 0.25
    assert run.model is not None and run.model.is_dir()


TRAIN = """
from pathlib import Path
import slipstream

with Path("starts").open("a") as starts:
    starts.write("x")

def reward(prompt, text):
    return 0.0

{call}
"""
IN_PYTHON = "slipstream.train({config!r}, **{{'reward.function': 'train:reward'}})"
AS_COMMAND = """
import subprocess, sys
subprocess.run([sys.executable, "-m", "core.quickstart", "ppo-math", "--dry-run", "--config", {config!r},
                "reward.function=train:reward"])
"""


@pytest.mark.parametrize("call", [IN_PYTHON, AS_COMMAND], ids=["slipstream.train", "command"])
def test_a_script_that_a_run_imports_does_not_start_another_run(call: str, tmp_path: Path) -> None:
    config = write_run(tmp_path, SMALLEST_PPO)
    done = python(TRAIN.format(call=call.format(config=str(config))), tmp_path)
    assert (tmp_path / "starts").read_text() in ("x", "xx"), "the script, and its import by the run"
    refused = [line for line in done.stderr.splitlines() if "a run imports train, which starts a run itself" in line]
    assert len(refused) == 1 and refused[0].count('put the call under `if __name__ == "__main__":`') == 1


def own_package(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").touch()
    (folder / name / "calculator.py").write_text("def evaluate(text):\n    return 0.0\n")


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("core", "slipstream.train('x.yaml')"), ("tools", "slipstream.make_demo_data"),
    ],
)  # fmt: skip
def test_a_package_of_the_project_that_hides_one_of_slipstream_is_named(name: str, use: str, tmp_path: Path) -> None:
    own_package(tmp_path, name)
    *_, last = python(f"import slipstream\n{use}", tmp_path).stderr.splitlines()
    assert last.startswith("ImportError: ") and "hides it: rename yours, or start the run with" in last
    assert str(tmp_path / name) in last and f"package '{name}'" in last


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("from tools.calculator import evaluate", "judge:score"),
        ("", "tools.calculator:evaluate"),
    ],
)
def test_a_reward_that_needs_a_hidden_package_names_it(text: str, spec: str, tmp_path: Path) -> None:
    own_package(tmp_path, "tools")
    (tmp_path / "judge.py").write_text(f"{text}\ndef score(prompt, text):\n    return 0.0\n")
    config = write_run(tmp_path, SMALLEST_PPO)
    command = ["-m", "core.quickstart", "ppo-math", "--dry-run", "--config", str(config), f"reward.function={spec}"]
    done = python("", tmp_path, *command)
    assert done.returncode == 2
    assert f"{tmp_path / 'tools'} is hidden by Slipstream's package 'tools': rename yours" in done.stderr
