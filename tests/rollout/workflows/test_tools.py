"""workflow.type=tools: the policy calls tools, their results are context, and the last answer is scored."""

import asyncio
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from helpers.both_sides import BothSides
from helpers.chat_tokenizer import OneVersion, Scripted, chat_tokenizer
from helpers.simulated_sampling import make_dataset
from rollout.experience import MemoryExperience, Schedule, StalenessAdmission, Tags
from rollout.journal import JournaledSampler
from rollout.plugins import PluginError
from rollout.tools import function_tool
from rollout.types import Prompt, SamplingParams, Trajectory
from rollout.workflows import WorkflowChoice, close_workflow, make_workflow
from rollout.workflows.tools import ToolsWorkflow

TOKENIZER = chat_tokenizer()
PROMPT = Prompt(
    query_id="q", index=1, task="t", text="<|im_start|>", token_ids=np.array([5], np.int32), solutions=("2",),
    question="What is 6 * 7?",
)  # fmt: skip
MODULE = '''
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    with open(__file__ + ".calls", "a") as file:
        file.write("x")
    return a + b

async def shout(text: str, times: list[int] = ()) -> str:
    """Shout."""
    return text.upper()

def fails(a: int) -> int:
    """Fail."""
    raise KeyError(a)

def silent(a: int) -> int:
    return a

def hangs() -> int:
    """Never end."""
    import time
    time.sleep(1000)

def vague(a) -> int:
    """Take anything."""
    return a
'''
SERVER = """
import os

from mcp.server import MCPServer

server = MCPServer("numbers")

@server.tool()
def double(n: int) -> int:
    "Double a number."
    return 2 * n

@server.tool()
def end() -> None:
    "End the server."
    os._exit(1)

server.run()
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_tools.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("own_tools", None)


class Pool:
    """A reward pool without processes: the length of each text."""

    async def score_many(self, prompt: Prompt, texts: list[str]) -> list[float]:
        return [float(len(text)) for text in texts]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def converse(*answers: str, journal: JournaledSampler | None = None, **options: Any) -> tuple[Trajectory, str]:
    """Run one sample whose policy answers so; return its trajectory and what it read, trained parts in brackets."""
    turns = iter(answers)
    generator = journal or Scripted(TOKENIZER, lambda _: f"{next(turns)}<|im_end|>")
    workflow: Any = make_workflow(
        WorkflowChoice(type="tools", options={"tools": options}),
        tokenizer=TOKENIZER, reward_pool=Pool(), sampling=SamplingParams(max_new_tokens=600), group_size=1, seed=1,
    )  # fmt: skip

    async def main() -> list[Trajectory]:
        if journal is not None:
            journal.enter()
        try:
            return await workflow.run(PROMPT, generator)
        finally:
            await close_workflow(workflow)

    [t] = asyncio.run(main())
    shown, last = "", False
    for token, trained in zip(t.token_ids.tolist(), t.loss_mask.tolist(), strict=True):
        shown += ("[" if trained else "]") * (trained != last) + TOKENIZER.decode([token])
        last = trained
    return t, shown


def test_the_policy_runs_code_and_its_last_answer_is_scored() -> None:
    t, shown = converse(f"I compute.{call('python', code='6 * 7')}", "It is 42.")
    assert '"name": "python"' in shown and "<|im_start|>user\nWhat is 6 * 7?<|im_end|>" in shown
    assert shown.endswith(
        "</tool_call><|im_end|>]\n<|im_start|>user\n<tool_response>\n42\n\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[It is 42.<|im_end|>"
    )
    assert t.reward == len("It is 42.")
    assert t.metrics == {"num_turns": 2.0, "num_tool_calls": 1.0, "num_tool_errors": 0.0, "context_full": 0.0}


def test_calls_of_one_turn_are_made_together_and_errors_are_read_by_the_policy() -> None:
    calls = [call("add", a=1, b=2), call("shout", text="hi"), call("fails", a=3), call("nothing"), call("add", c=1)]
    t, shown = converse(
        "".join(calls), "Done.", tools=["own_tools:add", "own_tools:shout", "own_tools:fails"], result_chars=60
    )
    results = [part.partition("\n</tool_response>")[0] for part in shown.split("<tool_response>\n")[1:]]
    assert results[:3] == ["3", "HI", "Error: KeyError: 3"]
    assert results[3] == "Error: there is no tool 'nothing'; there are add, shout, fai\n[cut]"
    assert results[4].startswith("Error: add: missing a required argument: 'a'")
    assert (t.metrics["num_tool_calls"], t.metrics["num_tool_errors"]) == (5.0, 3.0)


@pytest.mark.parametrize(
    ("answers", "options", "turns", "full"),
    [
        ([call("python", code="1")] * 3, {"max_turns": 2}, 2.0, 0.0),
        ([call("python", code="1")] * 9, {"context_tokens": 700}, 3.0, 1.0),
        (["word " * 500], {"context_tokens": 700}, 1.0, 1.0),
        (["<tool_call>\n{broken}\n</tool_call>"], {}, 1.0, 0.0),
    ],
)
def test_a_conversation_ends_at_its_limits(answers: list[str], options: Any, turns: float, full: float) -> None:
    t, _ = converse(*answers, **options)
    assert (t.metrics["num_turns"], t.metrics["context_full"]) == (turns, full)
    assert t.loss_mask[-1] and len(t.token_ids) <= options.get("context_tokens", 4096)


def test_functions_that_never_end_take_no_place_from_others() -> None:
    async def main() -> None:
        hanging = asyncio.gather(*(function_tool("own_tools:hangs").call({}) for _ in range(40)))
        assert await asyncio.wait_for(function_tool("own_tools:add").call({"a": 1}), 60) == "2"
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "pack"), 60) == "pack"
        hanging.cancel()

    asyncio.run(main())
    t, shown = converse(call("hangs"), "Done.", tools=["own_tools:hangs"], tool_seconds=0.2)
    assert "Error: hangs took more than 0.2 s." in shown and t.metrics["num_tool_errors"] == 1.0


def test_a_call_of_python_has_its_time_from_its_beginning() -> None:
    """All calls together take longer than one may, which leaves a busy host 3 s for each."""
    waits = call("python", code="import time; time.sleep(0.6)")
    t, shown = converse(waits * 6, "Done.", tool_seconds=3.5, num_workers=1)
    assert t.metrics["num_tool_calls"] == 6 and "Error" not in shown


def test_after_a_restart_a_call_is_not_made_again(module: Path) -> None:
    answers = [call("add", a=1), "two"]
    store = MemoryExperience()
    tags = Tags(id="train/q/0", group_id="train/q/0", task="t", row="q", epoch=0, version=0)
    assert store.open(tags, StalenessAdmission(Schedule(num_prompts=1, batch_size=1), 0)) == "open"
    for _ in range(2):
        generator = Scripted(TOKENIZER, lambda prompt: answers["<tool_response>" in prompt] + "<|im_end|>")
        _, shown = converse(journal=JournaledSampler(generator, store, "train/q/0"), tools=["own_tools:add"])
        assert "<tool_response>\n2\n" in shown
        restarted = MemoryExperience()
        restarted.load_state_dict(pickle.loads(pickle.dumps(store.state_dict())))
        store = restarted
    assert (module / "own_tools.py.calls").read_text() == "x"


def test_tools_of_an_mcp_server_are_called(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER)
    spec = f"mcp:{sys.executable} {tmp_path / 'server.py'}"
    t, shown = converse(call("double", n=21), "42", tools=[spec])
    assert "Double a number." in shown and "<tool_response>\n42\n" in shown
    t, shown = converse(call("double", n="x"), "42", tools=[spec])
    assert t.metrics["num_tool_errors"] == 1.0


def test_calls_after_the_end_of_an_mcp_server_reach_a_new_one(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER)
    spec = f"mcp:{sys.executable} {tmp_path / 'server.py'}"
    answers = [call("double", n=1), call("end"), call("double", n=21), "42"]
    t, shown = converse(*answers, tools=[spec], tool_seconds=60)
    assert "<tool_response>\n2\n" in shown and "<tool_response>\n42\n" in shown
    assert (t.metrics["num_tool_calls"], t.metrics["num_tool_errors"]) == (3.0, 1.0)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("own_tools:silent", "needs a docstring"),
        ("own_tools:vague", "its parameter a needs an annotation out of str, int"),
        ("own_tools:MODULE", "has no 'MODULE'"),
        ("bash", "write it as package.module:Name"),
    ],
)
def test_what_is_no_tool_is_refused(spec: str, said: str) -> None:
    with pytest.raises(PluginError, match=said):
        function_tool(spec)


def test_a_name_that_is_no_tool_is_answered_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"unknown tool 'shel'; use one of python, shell, mcp.*did you mean 'shell'"):
        ToolsWorkflow.Config(tools=["shel"])


def test_two_tools_of_one_name_are_refused(module: Path) -> None:
    (module / "more_tools.py").write_text("from own_tools import add\nasync def python():\n    'Run.'\n")
    for other, name in (("own_tools:add", "add"), ("more_tools:add", "add"), ("more_tools:python", "python")):
        with pytest.raises(ValueError, match=f"and {other} both have a tool '{name}'; rename one"):
            ToolsWorkflow.Config(tools=["python", "own_tools:add", other])
    with pytest.raises(ValueError, match="mcp:serve is listed twice"):
        ToolsWorkflow.Config(tools=["mcp:serve", "mcp:serve"])


def test_a_tool_of_an_mcp_server_has_a_name_of_its_own(module: Path) -> None:
    pytest.importorskip("mcp")
    (module / "server.py").write_text(SERVER.replace("def double", "def add"))
    with pytest.raises(PluginError, match="own_tools:add and mcp:.* both have a tool 'add'"):
        converse("42", tools=["own_tools:add", f"mcp:{sys.executable} {module / 'server.py'}"])


def test_a_template_without_tool_calls_is_refused() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    choice = WorkflowChoice(type="tools", options={"tools": {}})
    with pytest.raises(ValueError, match="has no chat template that writes tool calls"):
        make_workflow(
            choice, tokenizer=tokenizer, reward_pool=Pool(), sampling=SamplingParams(max_new_tokens=9), group_size=1,
            seed=1,
        )  # fmt: skip


def test_a_shell_whose_package_is_not_installed_is_refused(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "shellsim", raising=False)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if "site-packages" not in place])
    with pytest.raises(ValueError, match=r"shell: shellsim is not installed; pip install 'slipstream\[sandbox\]'"):
        ToolsWorkflow.Config(tools=["shell"])


@pytest.mark.nightly
async def test_a_shell_that_hangs_costs_one_retry_and_is_named(caplog) -> None:
    pytest.importorskip("shellsim", reason="shellsim is not installed")
    asked: list[str] = []

    def answer(text: str) -> str:
        asked.append(text)
        if len(asked) == 2:
            [worker] = [p for p in psutil.Process().children() if "rollout.environments.worker" in p.cmdline()]
            worker.suspend()  # no command hangs by itself: what they compute is limited
        return "It is done.<|im_end|>" if len(asked) == 4 else f"{call('shell', command='echo on')}<|im_end|>"

    options = {"tools": {"tools": ["shell"], "tool_seconds": 10}}
    workflow: Any = make_workflow(
        WorkflowChoice(type="tools", options=options),
        tokenizer=TOKENIZER, reward_pool=Pool(), sampling=SamplingParams(max_new_tokens=600), group_size=1, seed=1,
    )  # fmt: skip
    generator = OneVersion(TOKENIZER, answer)
    try:
        async with BothSides(make_dataset(1), workflow, generator, batch_size=1, max_staleness=0) as producer:
            [[t]] = await producer.take(0)
            assert producer.stats()["rollout/num_failures"] == 1
    finally:
        await close_workflow(workflow)
    assert "rollout.environments.shell:Shell: step() took more than 10 s" in caplog.text
    assert TOKENIZER.decode(t.token_ids).count("<tool_response>\non\n") == 1 and len(asked) == 4


def test_files_of_a_shell_live_as_long_as_the_episode_and_over_a_restart() -> None:
    pytest.importorskip("shellsim", reason="shellsim is not installed")

    def life(store: MemoryExperience, *answers: str) -> tuple[Trajectory, str]:
        turns = iter(answers)
        sampler = Scripted(TOKENIZER, lambda _: f"{next(turns)}<|im_end|>")
        return converse(journal=JournaledSampler(sampler, store, "train/q/1"), tools=["shell"])

    store, begin = MemoryExperience(), call("shell", command="echo $RANDOM > f; cat f")
    tags = Tags(id="train/q/1", group_id="train/q/1", task="t", row="q", epoch=0, version=0)
    assert store.open(tags, StalenessAdmission(Schedule(num_prompts=1, batch_size=1), 0)) == "open"
    with pytest.raises((RuntimeError, StopIteration)):
        life(store, begin)  # the policy is lost after one call
    again = MemoryExperience()
    again.load_state_dict(pickle.loads(pickle.dumps(store.state_dict())))
    t, read = life(again, call("shell", command="cat f; while true; do :; done"), call("shell", command="cat f"), "x")
    _, undisturbed = converse(
        begin, call("shell", command="cat f; while true; do :; done"), call("shell", command="cat f"), "x",
        tools=["shell"],
    )  # fmt: skip
    assert read == undisturbed and "cpu_exhausted" in read
    assert (t.metrics["num_tool_calls"], t.metrics["num_tool_errors"]) == (3.0, 1.0)
