"""A request to the endpoint and its answer, in the one form that all dialects are read into.

Messages are {role, content, tool_calls?, tool_call_id?}: contents are texts, arguments of tool calls dictionaries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rollout.data.chat_template import Message, Messages, Tools

Finish = Literal["stop", "length", "tool_calls"]
Event = tuple[str | None, object]
"""Of a stream: its name, where the dialect has one, and its data, a text or what is sent as JSON."""


class CallError(ValueError):
    """A request that is refused, as each dialect reports it. `status`: of HTTP."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a client asks for."""

    messages: Messages
    tools: Tools = None
    """In OpenAI's form, as chat templates read them."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    name: str
    """The same for requests that are equal in everything."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call of a tool that the policy wrote."""

    id: str
    name: str
    arguments: Mapping[str, object]

    @property
    def json(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the policy answered."""

    id: str
    """Letters and digits, the same after a restart."""
    text: str
    reasoning: str
    tool_calls: Sequence[ToolCall]
    finish: Finish
    stopped_at: str | None
    """The stop sequence of the client that ended it."""
    prompt_tokens: int
    completion_tokens: int
    logprobs: Callable[[], Sequence[tuple[str, float]]]
    """Text and log-probability of each sampled token."""

    @property
    def message(self) -> Message:
        """The answer as a message of the conversation."""
        return answer_message(self.text, self.tool_calls)


def answer_message(text: str, calls: Sequence[ToolCall]) -> Message:
    """Return an answer of the policy as a message of the conversation."""
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
            for c in calls
        ]
    return message


def said(message: Message) -> str:
    """Return what identifies a message: clients drop thoughts, order keys anew and strip blanks."""
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    return json.dumps([message["role"], message["content"].strip(), calls], sort_keys=True, default=str)
