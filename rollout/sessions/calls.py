"""A request to the endpoint and its answer, in the one form that all dialects are read into.

Messages are {role, content, tool_calls?, tool_call_id?}: contents are texts, arguments of tool calls dictionaries.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, overload

from rollout.data.chat_template import Message, Messages, Tools, read_messages

POLICY = "policy"
"""Name of the model; other names are aliases of it."""
_OPTIONS: Mapping[str, tuple[Sequence[object], str]] = {
    "n": ((1,), "ask once for each answer"),
    "top_logprobs": ((0,), "only the sampled tokens have log-probabilities"),
    "tool_choice": (("auto", "none"), "the policy decides whether it calls a tool"),
    "frequency_penalty presence_penalty logit_bias": ((0, {}), "the policy is sampled as it is trained"),
    "response_format text.format output_format output_config": (("text", {}), "answers are text and calls of tools"),
    "background include": ((False, []), "answers are sent once, as they are"),
    "conversation": ((), "send previous_response_id"),
}
"""Names of options: what they may be beside null, and why nothing else."""
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


T = TypeVar("T")
D = TypeVar("D")
_REQUIRED = object()


@overload
def read(body: Mapping[str, object], name: str, kind: type[T]) -> T: ...


@overload
def read(body: Mapping[str, object], name: str, kind: type[T], default: D) -> T | D: ...


def read(body: Mapping[str, object], name: str, kind: type, default: object = _REQUIRED) -> object:
    """Return a parameter of a request, which must have the type `kind`; null is the default."""
    value = body.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        found = "nothing" if value is None else type(value).__name__
        raise CallError(f"{name} must be of type {kind.__name__}, got {found}.", param=name)
    return value


def refuse_unsupported(body: Mapping[str, object]) -> None:
    """Raise CallError for options of any dialect that change the answer and are not supported or out of bounds."""
    text = body.get("text")
    asked = {**body, "text.format": text.get("format") if isinstance(text, Mapping) else None}
    for names, (allowed, why) in _OPTIONS.items():
        for name in names.split():
            if (value := _type_of(asked.get(name))) not in (None, *allowed):
                raise CallError(f"{name}={value!r} is not supported: {why}.", param=name)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if (most := read(body, name, int, None)) is not None and most < 1:
            raise CallError(f"{name}={most}: it must be at least 1.", param=name)
    if body.get("logprobs") and body.get("model", POLICY) != POLICY:
        message = f"log-probabilities are those of the policy: ask for model={POLICY!r}, not {body['model']!r}."
        raise CallError(message, param="model")


def _type_of(value: object) -> object:
    """Return the type of an option {type, ...}, or the option."""
    return value.get("type", value) if isinstance(value, Mapping) else value


def messages_of(messages: Iterable[Message], name: str = "messages") -> Messages:
    """Check messages of any dialect that are in the form of chat templates already. `name`: of the parameter."""
    try:
        found = read_messages(list(messages), name, may_be_empty=True)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CallError(f"{name}: {error}", param=name) from error
    for message in found:
        if message["role"] not in ("system", "user", "assistant", "tool"):
            raise CallError(f"{name}: there is no role {message['role']!r}.", param=name)
    return found


def text_of(content: object, kinds: Sequence[str]) -> str:
    """Return the text of a content: text, or a list of parts {type, ...} of `kinds`."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind not in kinds:
            raise CallError(f"content of type {kind!r} is not supported, only text.", param="messages")
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def stop_of(value: object, name: str) -> tuple[str, ...]:
    """Return texts that end an answer."""
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise CallError(f"{name} must be a text or a list of texts, got {value!r}.", param=name)
    return tuple(found)


def tools_of(body: Mapping[str, object]) -> Tools:
    """Return the tools of a request, {type: function, function: {name, description, parameters}} or flat."""
    if _type_of(body.get("tool_choice")) == "none":
        return None
    found = []
    for tool in read(body, "tools", list, []):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise CallError(f"tools: only functions are supported, got {str(tool)[:80]}.", param="tools")
        function = tool.get("function", {k: v for k, v in tool.items() if k not in ("type", "strict")})
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise CallError(f"tools: a function needs a name, got {str(tool)[:80]}.", param="tools")
        known = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
        found.append({"type": "function", "function": known})
    return tuple(found) or None


def request_name(body: Mapping[str, object]) -> str:
    """Return the same text for equal requests."""
    same = json.dumps(body, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(same.encode(errors="surrogatepass"), digest_size=16).hexdigest()
