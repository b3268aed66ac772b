"""What a tool is, functions of the user as tools, and the tool `python`."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import get_args, get_origin, get_type_hints

from rollout.plugins import PluginError, find_plugin
from rollout.sandbox.pool import Sandbox

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
