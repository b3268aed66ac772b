"""MCP servers as tools: a command with the protocol on its standard streams, or a URL. Package `mcp`."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from rollout.plugins import PluginError, find_plugin
from rollout.tools.tool import Tool, ToolError

_START_SECONDS = 60.0


class McpServer:
    """A connection to one server, held by a task of its own: its streams are closed where they were opened."""

    def __init__(self, spec: str) -> None:
        """`spec`: a command, or a URL that begins with http."""
        self._spec = spec
        self._closing = asyncio.Event()
        self._tools: asyncio.Future[list[Tool]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    async def tools(self) -> list[Tool]:
        """Return the tools of the server once it has started. Raises ToolError."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._tools), _START_SECONDS)
        except TimeoutError:
            raise ToolError(f"MCP server {self._spec!r} did not start within {_START_SECONDS:g} s") from None

    async def close(self) -> None:
        """End the connection, and the server where it is a command."""
        self._closing.set()
        if not self._tools.done():  # the server does not answer
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _hold(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                read, write, *_ = await stack.enter_async_context(_connect(self._spec))
                session = await stack.enter_async_context(find_plugin("mcp:ClientSession", kind="tool")(read, write))
                await session.initialize()
                listed = (await session.list_tools()).tools
                self._tools.set_result([_tool(session, one) for one in listed])
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - of the server or its library: whoever waits for tools gets it
            if not self._tools.done():
                failure = ToolError(f"MCP server {self._spec!r}: {type(error).__name__}: {error}")
                failure.__cause__ = error
                self._tools.set_exception(failure)


def check_mcp(spec: str) -> None:
    """Raise PluginError where the package `mcp` is missing, or no command is named."""
    find_plugin("mcp:ClientSession", kind=f"tool mcp:{spec}")
    if not spec.strip():
        raise PluginError("tool mcp: write mcp:COMMAND or mcp:http://...")


def _connect(spec: str) -> Any:
    if spec.startswith(("http://", "https://")):
        return find_plugin("mcp.client.streamable_http:streamable_http_client", kind="tool")(spec)
    command, *arguments = shlex.split(spec)
    parameters = find_plugin("mcp:StdioServerParameters", kind="tool")(command=command, args=arguments)
    return find_plugin("mcp:stdio_client", kind="tool")(parameters)


def _tool(session: Any, listed: Any) -> Tool:
    async def call(arguments: Mapping[str, Any]) -> str:
        try:
            result = await session.call_tool(listed.name, dict(arguments))
        except Exception as error:  # of the server: the policy reads what went wrong
            raise ToolError(f"{type(error).__name__}: {error}") from error
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise ToolError(text)
        return text

    return Tool(name=listed.name, description=listed.description or "", parameters=listed.input_schema, call=call)
