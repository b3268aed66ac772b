"""workflow.type=endpoint runs a program of the user for each sample and trains on what it asked the policy."""

import asyncio
import json
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import tiny_models
from helpers.chat_tokenizer import Scripted, chat_tokenizer
from helpers.frameworks import FRAMEWORKS
from rollout.experience import MemoryExperience, Schedule, StalenessAdmission, Tags
from rollout.inference.embedded.generator import EmbeddedGenerator
from rollout.journal import JournaledSampler
from rollout.programs import ProgramError
from rollout.trajectories import turns
from rollout.types import Completion, GenerateRequest, Prompt, SamplingParams
from rollout.workflows import WorkflowChoice, make_workflow

TOKENIZER = chat_tokenizer()
PROMPT = Prompt(
    query_id="q", index=1, task="t", text="1+1?", token_ids=np.array([5], np.int32), solutions=("2",), meta={"level": 3}
)
CLIENT = """
import asyncio, json, os, sys, urllib.request

def ask(url, key, text):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers)) as response:
        return json.load(response)["choices"][0]["message"]["content"]

async def agent(row, endpoint):
    arguments = endpoint.openai
    return await asyncio.to_thread(ask, arguments["base_url"], arguments["api_key"], row["prompt"])

async def rates_itself(row, endpoint):
    await agent(row, endpoint)
    return row["level"] / 4

async def asks_thrice(row, endpoint):
    words = ["7", os.environ.get("OWN_WORD", "8"), "9"]
    return "".join([await agent({"prompt": word}, endpoint) for word in words])

async def asks_nothing(row, endpoint):
    return 1.0

async def wrong(row, endpoint):
    await agent(row, endpoint)
    return {"score": 1}

def not_async(row, endpoint):
    return 1.0

if __name__ == "__main__":
    row = json.load(sys.stdin)
    assert "solutions" not in row
    print("It is", ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], row["prompt"]))
"""


class Pool:
    """A reward pool without processes: the length of each text."""

    async def score_many(self, prompt: Prompt, texts: list[str]) -> list[float]:
        return [float(len(text)) for text in texts]


class Printed:
    """A reward pool without processes: the reward of the example."""

    async def score_many(self, prompt: Prompt, texts: list[str]) -> list[float]:
        from examples.verifiers_program import reward

        return [reward(prompt, text) for text in texts]


def workflow(group_size: int = 2, **options: Any) -> Any:
    choice = WorkflowChoice(type="endpoint", options={"endpoint": options})
    return make_workflow(
        choice, tokenizer=TOKENIZER, reward_pool=Pool(), sampling=SamplingParams(max_new_tokens=200),
        group_size=group_size, seed=1,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_agent.py").write_text(CLIENT)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "own_agent.py"


def test_a_coroutine_and_a_command_are_run_for_each_sample_and_scored(client: Path) -> None:
    for options, reward in (
        ({"program": "own_agent:agent"}, 1.0),
        ({"program": "own_agent:rates_itself"}, 0.75),
        ({"command": f"{sys.executable} {client}"}, 7.0),
    ):
        generator = Scripted(TOKENIZER, lambda _: "2<|im_end|>")
        group = asyncio.run(workflow(**options).run(PROMPT, generator))
        assert [(t.reward, t.rollout, t.metrics) for t in group] == [(reward, i, {"num_turns": 1.0}) for i in range(2)]
        assert len({r.seed for r in generator.requests}) == 2
        assert all(TOKENIZER.decode(t.token_ids[t.loss_mask]) == "2<|im_end|>" for t in group)


@pytest.mark.parametrize("changes", [False, True])
async def test_a_program_that_runs_again_gets_the_answers_of_before(
    changes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, reached = MemoryExperience(), asyncio.Event()
    tags = Tags(id="q/0", group_id="q/0", task="t", row="q", epoch=0, version=0)
    store.open(tags, StalenessAdmission(Schedule(num_prompts=1, batch_size=1), 0))
    answers = {"7": "12<|im_end|>", "8": "1234<|im_end|>", "6": "5<|im_end|>", "9": "123<|im_end|>"}
    before, after = (
        Scripted(TOKENIZER, lambda text: next(answer for word, answer in answers.items() if word in text))
        for _ in range(2)
    )

    class Killed:
        async def generate(self, request: GenerateRequest) -> Completion:
            completion = await before.generate(request)
            if len(before.requests) == 3:
                c, one = completion, slice(1)
                part = replace(c, token_ids=c.token_ids[one], logprobs=c.logprobs[one], versions=c.versions[one])
                journal.record_partial({request.request_id: replace(part, finish_reason="abort")})
                reached.set()
                await asyncio.sleep(600)
            return completion

    journal = JournaledSampler(Killed(), store, "q/0")
    run = asyncio.ensure_future(workflow(1, program="own_agent:asks_thrice").run(PROMPT, journal))
    await asyncio.wait([run, asyncio.ensure_future(reached.wait())], return_when=asyncio.FIRST_COMPLETED)
    run.cancel()
    assert isinstance(*await asyncio.gather(run, return_exceptions=True), asyncio.CancelledError)
    restarted = MemoryExperience()
    restarted.load_state_dict(pickle.loads(pickle.dumps(store.state_dict())))
    if changes:
        monkeypatch.setenv("OWN_WORD", "6")
    again = JournaledSampler(after, restarted, "q/0")
    group = await workflow(1, program="own_agent:asks_thrice").run(PROMPT, again)
    length = {word: len(TOKENIZER.encode(answer)) for word, answer in answers.items()}
    assert sum(int(t.loss_mask.sum()) for t in group) == sum(
        length[word] for word in ("7", "6" if changes else "8", "9")
    )
    assert [r.output is not None for r in after.requests] == [False, True][not changes :]
    assert again.num_replayed == length["7"] + (0 if changes else length["8"]) + 1
    assert again.num_lost == (length["8"] if changes else 0)


def test_errors_of_programs_and_of_the_policy_are_errors_of_the_workflow() -> None:
    def fails(**options: Any) -> Any:
        return asyncio.run(workflow(1, **options).run(PROMPT, Scripted(TOKENIZER, lambda _: "2<|im_end|>")))

    with pytest.raises(ValueError, match="q: the program ended without a request to the policy"):
        fails(program="own_agent:asks_nothing")
    with pytest.raises(TypeError, match="q: a program returns a number, a text or None, not dict"):
        fails(program="own_agent:wrong")
    with pytest.raises(ProgramError, match=r"ended with exit code 3: no such thing"):
        fails(command="echo no such thing >&2; exit 3")
    lost = Scripted(TOKENIZER, lambda _: ConnectionError("the generator is gone"))
    with pytest.raises(ConnectionError, match="the generator is gone"):
        asyncio.run(workflow(1, program="own_agent:agent").run(PROMPT, lost))


def test_a_cancelled_sample_takes_its_command_with_all_children(tmp_path: Path) -> None:
    async def main() -> None:
        pid_file = tmp_path / "pid"
        command = f"sleep 600 & echo $! > {pid_file}; wait"
        run = asyncio.ensure_future(workflow(1, command=command).run(PROMPT, Scripted(TOKENIZER, lambda _: "")))
        while not (pid_file.exists() and pid_file.read_text().strip()):
            await asyncio.sleep(0.02)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        for _ in range(500):
            if not is_running(int(pid_file.read_text())):
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the child of the command still runs")

    asyncio.run(main())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({}, ValueError, "needs a program or a command"),
        ({"program": "own_agent:agent", "command": "true"}, ValueError, "needs a program or a command, and not both"),
        ({"program": "own_agent:not_async"}, ValueError, "must be `async def not_async(row, endpoint)`"),
        ({"program": "own_agent:nothing"}, ValueError, "has no 'nothing'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        workflow(**options)
    assert said in str(raised.value)


def test_the_unmodified_clients_of_both_vendors_talk_to_the_policy() -> None:
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    tool = {"type": "object", "properties": {"a": {"type": "integer"}}}
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'

    async def agent(row: dict[str, Any], endpoint: Any) -> float:
        async with openai.AsyncOpenAI(**endpoint.openai) as client:
            function = {"name": "add", "description": "d", "parameters": tool}
            ask = client.chat.completions.create
            messages: list[Any] = [{"role": "user", "content": "1?"}]
            first = (
                await ask(model="m", messages=messages, tools=[{"type": "function", "function": function}])
            ).choices[0]
            assert json.loads(first.message.tool_calls[0].function.arguments) == {"a": 1}
            messages += [
                first.message,
                {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "2"},
            ]
            stream = await ask(
                model="m", messages=messages, tools=[{"type": "function", "function": function}], stream=True
            )
            assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "two"
            with pytest.raises(openai.BadRequestError, match="n=2 is not supported"):
                await ask(model="m", messages=messages, n=2)
            flat = {"type": "function", "name": "add", "description": "d", "parameters": tool, "strict": False}
            response = await client.responses.create(model="m", input="2?", tools=[flat])
            assert response.output[-1].type == "function_call"
            async with client.responses.stream(model="m", input=[{"role": "user", "content": "no tools"}]) as events:
                final = [e async for e in events][-1]
            assert final.response.output_text.startswith("<tool_call>")
        async with anthropic.AsyncAnthropic(**endpoint.anthropic) as client:
            tools = [{"name": "add", "description": "d", "input_schema": tool}]
            turns: list[Any] = [{"role": "user", "content": "3?"}]
            message = await client.messages.create(model="m", max_tokens=99, messages=turns, tools=tools)
            assert message.stop_reason == "tool_use" and message.content[0].input == {"a": 1}
            result = {"type": "tool_result", "tool_use_id": message.content[0].id, "content": "2"}
            turns += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
            async with client.messages.stream(model="m", max_tokens=99, messages=turns, tools=tools) as stream:
                assert await stream.get_final_text() == "two"
            counted = await client.messages.count_tokens(model="m", messages=turns, tools=tools)
            assert counted.input_tokens > 50
            with pytest.raises(anthropic.BadRequestError, match="is not supported"):
                await client.messages.create(
                    model="m", max_tokens=9, messages=turns, tools=tools, tool_choice={"type": "any"}
                )
        return 1.0

    answers = {False: call, True: "two<|im_end|>"}
    generator = Scripted(TOKENIZER, lambda text: answers["<tool_response>" in text])
    made = workflow(1, program="own_agent:agent")
    made._program = agent
    group = asyncio.run(made.run(PROMPT, generator))
    assert len(group) == 4 and sum(int(t.loss_mask.sum()) for t in group) == sum(
        len(TOKENIZER.encode(answers["<tool_response>" in TOKENIZER.decode(r.prompt_ids)])) for r in generator.requests
    )


def trained_by(agent: Any, answer: Any) -> str:
    """Run a program once; return the text that is trained."""
    made = workflow(1, program="own_agent:agent")
    made._program = agent
    group = asyncio.run(made.run(PROMPT, Scripted(TOKENIZER, answer)))
    return "".join(TOKENIZER.decode(t.token_ids[t.loss_mask].tolist()) for t in group)


@pytest.mark.nightly
def test_an_agent_of_openai_agents_calls_a_tool() -> None:
    agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")

    async def agent(row: dict[str, Any], endpoint: Any) -> float:
        agents.set_tracing_disabled(True)

        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        async with openai.AsyncOpenAI(**endpoint.openai) as client:
            model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
            adder = agents.Agent(name="adder", instructions="Add.", model=model, tools=[agents.function_tool(add)])
            result = await agents.Runner.run(adder, row["prompt"])
        assert result.final_output == "3"
        return 1.0

    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
    assert trained_by(agent, lambda text: "3<|im_end|>" if "<tool_response>" in text else call) == f"{call}3<|im_end|>"


@pytest.mark.nightly
def test_an_agent_of_smolagents_writes_code() -> None:
    smolagents = pytest.importorskip("smolagents")
    pytest.importorskip("openai")

    async def agent(row: dict[str, Any], endpoint: Any) -> float:
        arguments = endpoint.openai
        model = smolagents.OpenAIServerModel(
            "policy", api_base=str(arguments["base_url"]), api_key=arguments["api_key"], max_tokens=100
        )
        coder = smolagents.CodeAgent(tools=[], model=model, max_steps=3, verbosity_level=0)
        assert await asyncio.to_thread(coder.run, row["prompt"]) == 3
        return 1.0

    code = "Thought: add\n<code>\n{}\n</code>"  # its client stops there: what follows is not trained
    first, last = code.format("print(1 + 2)"), code.format("final_answer(3)")
    answer = lambda text: f"{last if 'print(1 + 2)' in text else first}<|im_end|>"  # noqa: E731
    assert trained_by(agent, answer) == first + last


@pytest.mark.nightly
@pytest.mark.parametrize("framework", ["agents", "smolagents"])
def test_agents_train_what_an_embedded_generator_samples_for_them(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    model = tiny_models.make_model("qwen2", vocab_size=len(TOKENIZER), max_position_embeddings=32_768)
    model.save_pretrained(tmp_path)
    sampled: list[list[int]] = []

    class Recorded(EmbeddedGenerator):
        async def generate(self, request: GenerateRequest) -> Completion:
            completion = await super().generate(request)
            sampled.append(completion.token_ids.tolist())
            return completion

    async def agent(row: dict[str, Any], endpoint: Any) -> str:
        return str(await FRAMEWORKS[framework](endpoint))

    async def main() -> list[Any]:
        made = workflow(group_size=1, program="own_agent:agent", context_tokens=32_000)
        made._program = agent
        generator = Recorded(tmp_path, max_running=4)
        group = await made.run(PROMPT, generator)
        await generator.close()
        return group

    trained = [t.token_ids[first:end].tolist() for t in asyncio.run(main()) for first, end in turns(t.loss_mask)]
    assert sorted(trained) == sorted(sampled) != []


VERIFIERS_PYTHON = os.environ.get("SLIPSTREAM_VERIFIERS_PYTHON")
"""An interpreter that imports verifiers, whose dependencies are not those of this project."""
TASKSET = """
import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Guess", "TwoTurns"]

class GuessTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def length(self, trace):
        return len(trace.last_reply) / 100

class Guess(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for i in range(9):
            yield GuessTask(vf.TaskData(name=str(i), prompt=f"Guess digit {i}."), self.config.task)

class TwoTurns(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for question in ("Sure?", "Thanks."):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                said = {"role": "assistant", "content": answer.choices[0].message.content}
                messages += [said, {"role": "user", "content": question}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
"""


@pytest.mark.nightly
@pytest.mark.skipif(VERIFIERS_PYTHON is None, reason="no verifiers here: set SLIPSTREAM_VERIFIERS_PYTHON")
def test_an_environment_of_verifiers_is_played_and_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "guess.py").write_text(TASKSET)
    block = {"taskset": {"id": "guess"}, "agent": {"runtime": {"type": "subprocess"}}}
    (tmp_path / "env.json").write_text(json.dumps(block))
    program = Path(__file__).parents[3] / "examples" / "verifiers_program.py"
    prompt = replace(PROMPT, meta={"task_index": 3})
    choice = {"command": f"{VERIFIERS_PYTHON} {program} {tmp_path / 'env.json'}"}
    answers = iter(["It is 7.<|im_end|>", "Yes, it is.<|im_end|>"])
    ran = workflow(1, **choice)
    ran._reward_pool = Printed()
    [t] = asyncio.run(ran.run(prompt, Scripted(TOKENIZER, lambda _: next(answers))))
    assert (t.reward, t.metrics) == (0.11, {"num_turns": 2.0})
    assert TOKENIZER.decode(t.token_ids[t.loss_mask]) == "It is 7.<|im_end|>Yes, it is.<|im_end|>"
    assert "Guess digit 3." in TOKENIZER.decode(t.token_ids) and "Sure?" in TOKENIZER.decode(t.token_ids)
