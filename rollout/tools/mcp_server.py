"""MCP servers as tools: a command with the protocol on its standard streams, or a URL. Package `mcp`."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING

from rollout.plugins import PluginError, find_plugin
from rollout.tools.tool import Tool, ToolError

if TYPE_CHECKING:
    from mcp import ClientSession, types

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
