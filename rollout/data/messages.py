"""Conversations as data sets have them, in one form: a tuple of {"role": ..., "content": ..., ...}.

Read are OpenAI's messages (role, content) and ShareGPT's (from, value), as lists or as json text. Keys such as
tool_calls stay, for the chat template. Invariant: a message that comes out of here has a role and a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.data.columns import parsed

Messages = tuple[dict[str, Any], ...]

_ROLES = {
    "human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant",
    "function_response": "tool", "observation": "tool",
}  # fmt: skip
"""Other names of the roles."""


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of messages, or json of one."""
    value = parsed(value) if isinstance(value, str) else value
    first = value[0] if isinstance(value, list | tuple) and value else None
    return isinstance(first, Mapping) and bool(first.keys() & {"role", "from"})


def read_messages(value: Any, column: str) -> Messages:
    """Return the messages in a column. Raises ValueError that names the column and the message."""
    value = parsed(value) if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not value:
        found = type(value).__name__
        raise ValueError(
            f'"{column}" must be a list of messages, as [{{"role": "user", "content": "..."}}], found {found}'
        )
    return tuple(_message(message, f'"{column}", message {number}') for number, message in enumerate(value, start=1))


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place}: must have a role and content, found {type(message).__name__}")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str) or not role:
        raise ValueError(f"{place}: has no role, only {sorted(message)}")
    content = message.get("content", message.get("value"))
    text = _text(content, place)
    if not text.strip() and role != "system" and not message.get("tool_calls"):
        raise ValueError(f"{place}: the content of role {role!r} is empty")
    text.encode()  # a lone surrogate is valid json and would fail in the tokenizer, far from its row
    others = {k: v for k, v in message.items() if k not in ("role", "from", "content", "value") and v is not None}
    return {"role": _ROLES.get(role, role), "content": text, **others}


def _text(content: Any, place: str) -> str:
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


def read_tools(value: Any, column: str) -> tuple[Any, ...] | None:
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
