"""The workflow of tools: the policy calls tools and answers, in one conversation in its chat template."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from pydantic import field_validator

from config_schema.section import Section, key
from rollout.data.chat_template import Messages
from rollout.data.encoder import Encoder
from rollout.environments.pool import EnvironmentPool, RemoteEnvironment
from rollout.journal import recorded
from rollout.plugins import unknown_name
from rollout.rewards.pool import RewardPool
from rollout.sandbox.pool import LEVELS, Sandbox, SandboxSettings
from rollout.sessions.bridge import Bridge
from rollout.sessions.calls import ToolCall, answer_message
from rollout.tools import McpServer, Tool, ToolError, check_mcp, check_names, function_tool, python_tool
from rollout.trajectories import Conversation, all_of
from rollout.types import Prompt, Sampler, SamplingParams, Tokenizer, Trajectory

_MCP = "mcp:"
_NAMED = ("python", "shell")


async def _run_command(shell: RemoteEnvironment, turn: asyncio.Lock, arguments: Mapping[str, object]) -> str:
    command = arguments.get("command")
    if not isinstance(command, str):
        raise ToolError("shell: needs the argument command, a text")
    async with turn:  # calls of one turn run in their order
        text, failed, _ = await shell.step(command)
    if failed:
        raise ToolError(text)
    return text


async def _no_shell(arguments: Mapping[str, object]) -> str:
    raise ToolError("shell: each sample has its own")


_SHELL = Tool(
    name="shell",
    description="Runs a command of the shell and returns what it prints. Files stay until the end.",
    parameters={"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    call=_no_shell,
    limits_itself=True,
    records_itself=True,
)


class ToolsWorkflow:
    """Lets the policy call tools until it answers without a call; the reward function scores that answer."""

    class Config(Section):
        """What workflow.options may contain."""

        tools: list[str] = key(
            ["python"],
            "python (code in the sandbox), shell, package.module:function, mcp:COMMAND or mcp:URL",
            min_length=1,
        )
        max_turns: int = key(8, "Answers of the policy", ge=1)
        context_tokens: int = key(4096, "Tokens of a conversation", ge=1)
        tool_seconds: float = key(10.0, "Time limit of a call", gt=0)
        result_chars: int = key(4000, "A longer result of a call is cut", ge=1)
        sandbox: str = key("auto", f"Level of the sandbox: auto, or one of {', '.join(LEVELS)}")
        memory_mib: int = key(256, "Memory of a call of python", ge=16)
        modules: list[str] = key([], "Installed modules that python may import, such as numpy")
        num_workers: int = key(2, "Calls of python at the same time", ge=1)

        @field_validator("tools")
        @classmethod
        def _check_tools(cls, tools: list[str]) -> list[str]:
            names = []
            for spec in tools:
                if spec.startswith(_MCP):
                    if tools.count(spec) > 1:
                        raise ValueError(f"{spec} is listed twice; leave one out")
                    check_mcp(spec.removeprefix(_MCP))
                elif spec == "shell" and find_spec("shellsim") is None:
                    raise ValueError("shell: shellsim is not installed; pip install 'slipstream[sandbox]'")
                elif spec in _NAMED:
                    names.append((spec, spec))
                elif ":" not in spec:
                    raise ValueError(unknown_name(spec, kind="tool", known=(*_NAMED, "mcp:COMMAND"), own="function"))
                else:
                    names.append((spec, function_tool(spec).name))
            check_names(names)
            return tools

        @field_validator("sandbox")
        @classmethod
        def _check_level(cls, level: str) -> str:
            if level not in ("auto", *LEVELS):
                raise ValueError(f"write auto or one of {', '.join(LEVELS)}")
            return level

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        reward_pool: RewardPool,
        sampling: SamplingParams,
        group_size: int,
        seed: int,
        options: Config,
        encoder: Encoder | None = None,
    ) -> None:
        """Raises ValueError for a chat template without tool calls."""
        self._encoder = encoder or Encoder(tokenizer)
        self._bridge = Bridge(self._encoder)
        if not self._bridge.writes_calls:
            raise ValueError(
                "workflow.type=tools: the model has no chat template that writes tool calls; set "
                "prompt.chat_template to one that does (slipstream check-template shows it)"
            )
        self._reward_pool, self._sampling = reward_pool, sampling
        self._group_size, self._seed, self._options = group_size, seed, options
        self._sandbox = Sandbox(
            SandboxSettings(
                level=options.sandbox, seconds=options.tool_seconds, memory_mib=options.memory_mib,
                output_chars=options.result_chars, modules=tuple(options.modules), num_workers=options.num_workers,
            )
        )  # fmt: skip
        self._shells = EnvironmentPool(
            "rollout.environments.shell:Shell", num_workers=options.num_workers, setup_seconds=60.0,
            step_seconds=options.tool_seconds,
        )  # fmt: skip
        self._servers: dict[str, McpServer] = {}
        self._tools: asyncio.Task[dict[str, Tool]] | None = None

    async def run(self, prompt: Prompt, generator: Sampler) -> list[Trajectory]:
        """Return one trajectory for each sample."""
        if self._tools is None or (self._tools.done() and self._tools.exception() is not None):
            self._tools = asyncio.create_task(self._start_tools())
        tools = await asyncio.shield(self._tools)
        return await all_of(self._sample(prompt, generator, number, tools) for number in range(self._group_size))

    async def close(self) -> None:
        """End the sandbox and the MCP servers."""
        self._sandbox.close()
        self._shells.close()
        for server in self._servers.values():
            await server.close()

    async def _start_tools(self) -> dict[str, Tool]:
        tools = [(spec, tool) for spec in self._options.tools for tool in await self._tools_of(spec)]
        check_names((spec, tool.name) for spec, tool in tools)
        return {tool.name: tool for _, tool in tools}

    async def _tools_of(self, spec: str) -> list[Tool]:
        if spec == "python":
            return [python_tool(self._sandbox)]
        if spec == "shell":
            return [_SHELL]
        if not spec.startswith(_MCP):
            return [function_tool(spec)]
        if spec not in self._servers:
            self._servers[spec] = McpServer(spec.removeprefix(_MCP))
        return await self._servers[spec].tools()

    async def _sample(self, prompt: Prompt, generator: Sampler, number: int, tools: Mapping[str, Tool]) -> Trajectory:
        if tools.get(_SHELL.name) is not _SHELL:
            return await self._converse(prompt, generator, number, tools)
        async with self._shells.open(f"shell {number}") as shell:
            await shell.reset({"memory_mib": self._options.memory_mib}, 0)
            own = replace(_SHELL, call=partial(_run_command, shell, asyncio.Lock()))
            return await self._converse(prompt, generator, number, {**tools, _SHELL.name: own})

    async def _converse(self, prompt: Prompt, generator: Sampler, number: int, tools: Mapping[str, Tool]) -> Trajectory:
        schemas = tuple(tool.schema for tool in tools.values())
        sample = Conversation(
            prompt, number=number, start=self._bridge.prompt(self._messages(prompt), schemas),
            context_tokens=self._options.context_tokens, opening="the prompt with its tools",
        )  # fmt: skip
        num_turns, said = 0, ""
        results: list[tuple[str, bool]] = []
        while not sample.is_full:
            completion = await sample.answer(generator, self._sampling, seed=self._seed)
            sample.sampled(completion)
            num_turns += 1
            sampled = completion.token_ids.tolist()
            _, said, read = self._bridge.read(self._bridge.text(sampled), schemas)
            calls = [
                ToolCall(
                    id=self._bridge.call_id(name, len(results) + i, otherwise=f"call{i:05}"), name=name, arguments=given
                )
                for i, (name, given) in enumerate(read)
            ]
            if not calls or completion.finish_reason == "length" or num_turns == self._options.max_turns:
                break
            found = await all_of(self._call(f"{number}.{num_turns}.{i}", tools, call) for i, call in enumerate(calls))
            results += found
            new = tuple(
                {"role": "tool", "name": call.name, "content": text, "tool_call_id": call.id}
                for call, (text, _) in zip(calls, found, strict=True)
            )
            sample.continue_with(self._bridge.following(answer_message(said, calls), sampled, new, schemas))
        [reward] = await self._reward_pool.score_many(prompt, [said])
        metrics = {
            "num_turns": num_turns,
            "num_tool_calls": len(results),
            "num_tool_errors": sum(failed for _, failed in results),
            "context_full": sample.is_full,
        }
        return sample.build(reward, {name: float(value) for name, value in metrics.items()})

    def _messages(self, prompt: Prompt) -> Messages:
        messages = prompt.meta.get("messages")
        return (
            tuple(messages)
            if isinstance(messages, list | tuple) and messages
            else self._encoder.turn(prompt.question or prompt.text)
        )

    async def _call(self, place: str, tools: Mapping[str, Tool], call: ToolCall) -> tuple[str, bool]:
        """Return (result, whether it failed) of a call, which is made once in an episode."""
        name = call.name

        async def make() -> tuple[str, bool]:
            if name not in tools:
                return f"Error: there is no tool {name!r}; there are {', '.join(tools)}.", True
            limit = None if tools[name].limits_itself else self._options.tool_seconds
            try:
                async with asyncio.timeout(limit):
                    return await tools[name].call(call.arguments), False
            except ToolError as error:
                return f"Error: {error}", True
            except TimeoutError:
                return f"Error: {name} took more than {self._options.tool_seconds:g} s.", True

        if name in tools and tools[name].records_itself:
            text, failed = await make()
        else:
            text, failed = await recorded(f"{name} {place}", make, asked=json.dumps(call.arguments, sort_keys=True))
        limit = self._options.result_chars
        return (text if len(text) <= limit else f"{text[:limit]}\n[cut]"), failed
