"""The tool `python`: code in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.sandbox.pool import Sandbox
from rollout.tools.tool import Tool, ToolError


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
