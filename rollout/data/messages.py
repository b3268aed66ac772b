"""Conversations as data sets have them, in one form: a tuple of {"role": ..., "content": ..., ...}.

Read are OpenAI's messages (role, content) and ShareGPT's (from, value), as lists or as json text. Keys such as
tool_calls stay, for the chat template. Invariant: a message that comes out of here has a role and a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.data.source import parsed

Message = dict[str, Any]
"""{"role": ..., "content": ..., ...}, with whatever keys chat templates read."""
Messages = tuple[Message, ...]

ANSWER_KEYS = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls", "function_call", "refusal")
"""Keys of what the assistant writes."""
LOSS_KEYS = ("weight", "train", "training", "loss")
"""Keys that say whether a turn of the assistant is trained on: 0 or false for no."""
_ROLES = {
    "user": "user", "human": "user", "system": "system", "assistant": "assistant", "gpt": "assistant",
    "bot": "assistant", "chatgpt": "assistant", "model": "assistant", "tool": "tool", "function_response": "tool",
    "observation": "tool",
}  # fmt: skip
"""Names of the roles, in whatever case."""


def is_conversation(value: object) -> bool:
    """Return whether a value is a list of messages, or json of one."""
    value = parsed(value) if isinstance(value, str) else value
    first = value[0] if isinstance(value, list | tuple) and value else None
    return isinstance(first, Mapping) and bool(first.keys() & {"role", "from"})


def read_messages(value: object, column: str, *, may_be_empty: bool = False) -> Messages:
    """Return the messages in a column. `may_be_empty`: turns without a text are allowed, as a policy may sample one.
    Raises ValueError that names the column and the message."""
    value = parsed(value) if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not value:
        found = type(value).__name__
        raise ValueError(
            f'"{column}" must be a list of messages, as [{{"role": "user", "content": "..."}}], found {found}'
        )
    return tuple(
        _message(message, f'"{column}", message {number}', may_be_empty)
        for number, message in enumerate(value, start=1)
    )


def _message(message: object, place: str, may_be_empty: bool) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place}: must have a role and content, found {type(message).__name__}")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str) or not role:
        raise ValueError(f"{place}: has no role, only {sorted(message)}")
    content = message.get("content", message.get("value"))
    role = _ROLES.get(role.lower(), role)
    text = _text(content, place)
    text.encode()  # a lone surrogate is valid json and would fail in the tokenizer, far from its row
    others = {k: v for k, v in message.items() if k not in ("role", "from", "content", "value") and v is not None}
    if calls := others.pop("tool_calls", None):
        others["tool_calls"] = _tool_calls(calls, place)
    says = may_be_empty or text.strip() or role in ("system", "tool") or any(map(others.get, ANSWER_KEYS))
    if not says:
        raise ValueError(f"{place}: the content of role {role!r} is empty")
    if others.get("weight", 1) not in (0, 1):
        raise ValueError(f"{place}: weight must be 0 or 1, found {others['weight']!r:.60}")
    return {"role": role, "content": text, **others}


def is_trained(message: Message) -> bool:
    """Return whether fine-tuning trains on a message: one of the assistant that does not say otherwise."""
    refused = message.get("weight", 1) == 0 or any(message.get(key) is False for key in LOSS_KEYS)
    return message["role"] == "assistant" and not refused


def _tool_calls(value: object, place: str) -> list[dict[str, object]]:
    """Return tool calls as {type, function: {name, arguments}} with arguments as dictionaries."""
    value = parsed(value) if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not all(isinstance(call, Mapping) for call in value):
        raise ValueError(f"{place}: tool_calls must be a list of calls, found {str(value)[:60]!r}")
    calls = []
    for call in value:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{place}: a tool call must have a function with a name, found {str(call)[:60]!r}")
        given = function.get("arguments")
        arguments = parsed(given.strip() or "{}") if isinstance(given, str) else given or {}
        if not isinstance(arguments, Mapping):
            raise ValueError(f"{place}: arguments of a tool call must be a JSON object, found {str(given)[:60]!r}")
        named = call if "function" in call else {"type": "function"}
        calls.append({**named, "function": {**function, "arguments": arguments}})
    return calls


def _text(content: object, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, list | tuple):
        kinds = {part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content}
        if kinds - {"text"}:
            raise ValueError(
                f"{place}: content of type {', '.join(map(str, sorted(kinds, key=str)))}; only text is supported"
            )
        return "".join(str(part["text"]) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{place}: content must be a text, found {type(content).__name__}")
    return content


def read_tools(value: object, column: str) -> tuple[object, ...] | None:
    """Return the functions that a row offers: JSON schemas, as a list or as json text. Raises ValueError."""
    value = parsed(value) if isinstance(value, str) else value
    if value is None or value == "" or value == []:
        return None
    if not isinstance(value, list | tuple):
        raise ValueError(f'"{column}" must be a list of JSON schemas of functions, found {type(value).__name__}')
    return tuple(parsed(tool) if isinstance(tool, str) else tool for tool in value)


def split_answer(messages: Messages) -> tuple[Messages, str | None]:
    """Return a conversation without the assistant's turns at its end, and the last one's text."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return messages[:end], None if end == len(messages) else str(messages[-1]["content"])
