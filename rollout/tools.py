"""Tools that the policy may call: functions of the user, the tool `python`, and MCP servers (package `mcp`)."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import shlex
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, get_args, get_origin, get_type_hints

from rollout.plugins import PluginError, find_plugin
from rollout.sandbox.pool import Sandbox

if TYPE_CHECKING:
    from mcp import ClientSession, types


_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


class ToolError(ValueError):
    """A call that failed, with the text that the policy reads."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool with the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, object]
    call: Callable[[Mapping[str, object]], Awaitable[str]]
    """Raises ToolError."""
    limits_itself: bool = False
    """The tool limits the time of its calls by itself: a call may wait for others before it begins."""

    records_itself: bool = False
    """Calls are in the journal of the episode without recorded()."""

    @property
    def schema(self) -> dict[str, object]:
        """The tool in OpenAI's form, as chat templates read it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def function_tool(spec: str) -> Tool:
    """Return the function at `spec`, "package.module:name", as a tool: its docstring and annotations describe it. It is
    `async def`, or runs in a thread. Raises PluginError."""
    function = find_plugin(spec, kind="tool")
    name = spec.partition(":")[2]
    if not callable(function):
        raise PluginError(f"tool {spec}: must be a function, is of type {type(function).__name__}")
    description = inspect.getdoc(function)
    if not description:
        raise PluginError(f"tool {spec}: needs a docstring, which the policy reads as its description")
    try:
        parameters = _parameters(function)
    except (TypeError, NameError) as error:
        raise PluginError(f"tool {spec}: {error}") from error

    async def call(arguments: Mapping[str, object]) -> str:
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise ToolError(f"{name}: {error}") from error
        try:
            if inspect.iscoroutinefunction(function):
                return _text(await function(**arguments))
            return _text(await _in_thread(function, arguments))
        except Exception as error:  # the policy reads what went wrong
            raise ToolError(f"{type(error).__name__}: {error}") from error

    return Tool(name=name, description=description, parameters=parameters, call=call)


def check_names(named: Iterable[tuple[str, str]]) -> None:
    """Check that each tool has its own name. `named`: where a tool comes from, and its name. Raises PluginError."""
    known: dict[str, str] = {}
    for spec, name in named:
        if name in known:
            raise PluginError(f"{known[name]} and {spec} both have a tool {name!r}; rename one of them or leave it out")
        known[name] = spec


def _in_thread(function: Callable[..., object], arguments: Mapping[str, object]) -> asyncio.Future[object]:
    """Run a function in a thread of its own: one that never ends takes no place from other work."""
    outcome: Future[object] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(function(**arguments))
        except BaseException as error:  # noqa: BLE001 (raised where it is awaited)
            outcome.set_exception(error)

    Thread(target=run, name=f"tool {function.__name__}", daemon=True).start()
    return asyncio.wrap_future(outcome)


def _parameters(function: Callable[..., object]) -> dict[str, object]:
    hints = get_type_hints(function)
    properties: dict[str, dict[str, object]] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"its parameter {name} must have a name in each call")
        hint = get_origin(hints.get(name)) or hints.get(name)
        if hint not in _TYPES:
            types = ", ".join(kind.__name__ for kind in _TYPES)
            raise TypeError(f"its parameter {name} needs an annotation out of {types}")
        properties[name] = {"type": _TYPES[hint]}
        if hint is list and (of := get_args(hints[name])) and of[0] in _TYPES:
            properties[name]["items"] = {"type": _TYPES[of[0]]}
        if parameter.default is parameter.empty:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required}


def _text(result: object) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def python_tool(sandbox: Sandbox) -> Tool:
    """Return a tool that runs code in `sandbox`."""

    async def call(arguments: Mapping[str, object]) -> str:
        code = arguments.get("code")
        if not isinstance(code, str):
            raise ToolError("python: needs the argument code, a text")
        ran = await sandbox.run_async(code)
        if ran.status != "ok":
            raise ToolError(ran.output)
        return ran.output

    return Tool(
        name="python",
        description="Runs Python code and returns what it prints and the value of its last expression. "
        "Each call begins anew.",
        parameters={"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        call=call,
        limits_itself=True,
    )


logger = logging.getLogger(__name__)

_START_SECONDS = 60.0
_CHECK_SECONDS = 15.0
"""Time limit of a server to answer after a call that failed; one that works on a slow call may not answer at once."""


class McpServer:
    """A connection to one server. Where a call fails and the server does not answer any more, the next call waits for
    a new connection; the failed one is not made again."""

    def __init__(self, spec: str) -> None:
        """`spec`: a command, or a URL that begins with http."""
        self._spec = spec
        self._check: asyncio.Task[None] | None = None
        self._connect()

    async def tools(self) -> list[Tool]:
        """Return the tools of the server once it has started. Raises ToolError; another call tries again."""
        try:
            _, tools = await self._checked()
        except ToolError:
            self._begin_check()
            raise
        return tools

    async def close(self) -> None:
        """End the connection, and the server where it is a command."""
        if self._check is not None:
            self._check.cancel()
            await asyncio.wait([self._check])
        await self._disconnect()

    def _connect(self) -> None:
        self._closing = asyncio.Event()
        self._connection: asyncio.Future[tuple[ClientSession, list[Tool]]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    async def _disconnect(self) -> None:
        self._closing.set()
        if not self._connection.done():  # the server does not answer
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _checked(self) -> tuple[ClientSession, list[Tool]]:
        """Return the session and the tools after a check that runs. Raises ToolError."""
        if self._check is not None:
            await asyncio.shield(self._check)
        return await self._started()

    def _begin_check(self) -> None:
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._connect_again())

    async def _started(self) -> tuple[ClientSession, list[Tool]]:
        """Return the session and the tools. Raises ToolError."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._connection), _START_SECONDS)
        except TimeoutError:
            raise ToolError(f"MCP server {self._spec!r} did not start within {_START_SECONDS:g} s") from None

    async def _hold(self) -> None:
        """Hold a connection in a task of its own: its streams are closed where they were opened."""
        connection, closing = self._connection, self._closing
        try:
            async with AsyncExitStack() as stack:
                read, write, *_ = await stack.enter_async_context(_transport(self._spec))
                session = await stack.enter_async_context(find_plugin("mcp:ClientSession", kind="tool")(read, write))
                await session.initialize()
                listed = (await session.list_tools()).tools
                connection.set_result((session, [self._tool(one) for one in listed]))
                await closing.wait()
        except Exception as error:  # noqa: BLE001 - of the server or its library: whoever waits for tools gets it
            while isinstance(error, ExceptionGroup):  # of the library's task groups
                error = error.exceptions[0]
            if not connection.done():
                failure = ToolError(f"MCP server {self._spec!r}: {type(error).__name__}: {error}")
                failure.__cause__ = error
                connection.set_exception(failure)

    def _tool(self, listed: types.Tool) -> Tool:
        async def call(arguments: Mapping[str, object]) -> str:
            result: types.CallToolResult | None = None
            try:
                session, _ = await self._checked()
                result = await session.call_tool(listed.name, dict(arguments))
            except ToolError:
                raise
            except Exception as error:  # of the server: the policy reads what went wrong
                raise ToolError(f"{type(error).__name__}: {error}") from error
            finally:
                if result is None:  # also at its time limit
                    self._begin_check()
            text = "\n".join(part.text for part in result.content if part.type == "text")
            if result.is_error:
                raise ToolError(text)
            return text

        return Tool(name=listed.name, description=listed.description or "", parameters=listed.input_schema, call=call)

    async def _connect_again(self) -> None:
        """Replace the connection if the server does not answer."""
        try:
            session, _ = await self._started()
            async with asyncio.timeout(_CHECK_SECONDS):
                await session.list_tools()
        except Exception as error:  # noqa: BLE001 - no answer, whatever the reason
            logger.warning("MCP server %r does not answer (%r); connecting again", self._spec, error)
            await self._disconnect()
            self._connect()


def check_mcp(spec: str) -> None:
    """Raise PluginError where the package `mcp` is missing, or no command is named."""
    find_plugin("mcp:ClientSession", kind=f"tool mcp:{spec}")
    if not spec.strip():
        raise PluginError("tool mcp: write mcp:COMMAND or mcp:http://...")


def _transport(spec: str) -> AbstractAsyncContextManager[tuple[object, ...]]:
    if spec.startswith(("http://", "https://")):
        return find_plugin("mcp.client.streamable_http:streamable_http_client", kind="tool")(spec)
    command, *arguments = shlex.split(spec)
    parameters = find_plugin("mcp:StdioServerParameters", kind="tool")(command=command, args=arguments)
    return find_plugin("mcp:stdio_client", kind="tool")(parameters)
