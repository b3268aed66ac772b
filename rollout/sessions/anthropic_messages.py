"""Anthropic messages: requests, answers, streams and errors. Source: the reference of Anthropic's API."""

from collections.abc import Iterator, Mapping

from rollout.data.chat_template import Message
from rollout.sessions.calls import (
    Answer,
    Call,
    CallError,
    Event,
    messages_of,
    read,
    request_name,
    stop_of,
    text_of,
    tools_of,
)

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DROPPED = ("thinking", "redacted_thinking")


def read_call(body: Mapping[str, object]) -> Call:
    """Return what a request asks for. Raises CallError."""
    system = body.get("system")
    messages: list[Message] = [{"role": "system", "content": text_of(system, ("text",))}] if system else []
    for message in read(body, "messages", list):
        messages += _messages(message)
    tools = [_tool(tool) for tool in read(body, "tools", list, [])]
    return Call(
        messages=messages_of(messages),
        tools=tools_of({**body, "tools": tools}),
        max_tokens=read(body, "max_tokens", int, None),
        stop=stop_of(body.get("stop_sequences"), "stop_sequences"),
        name=request_name(body),
    )


def _tool(tool: object) -> dict[str, object]:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") != "custom":
        raise CallError(f"tools: only tools of the client are supported, got {str(tool)[:80]}.", param="tools")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _messages(message: object) -> Iterator[Message]:
    """Yield one message for each result of a tool, and one for the rest."""
    if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
        raise CallError(f"messages: roles are user and assistant, got {str(message)[:80]}.", param="messages")
    content = message.get("content")
    if not isinstance(content, list):
        yield {"role": message["role"], "content": text_of(content, ())}
        return
    parts = {kind: [p for p in content if p.get("type") == kind] for kind in ("tool_result", "tool_use")}
    for result in parts["tool_result"]:
        text = text_of(result.get("content"), ("text",))
        yield {"role": "tool", "content": text, "tool_call_id": str(result.get("tool_use_id", ""))}
    rest = [p for p in content if p.get("type") not in (*parts, *_DROPPED)]
    calls = [
        {"id": p.get("id"), "type": "function", "function": {"name": p["name"], "arguments": p.get("input") or {}}}
        for p in parts["tool_use"]
    ]
    if rest or calls or not content:
        yield {"role": message["role"], "content": text_of(rest, ("text",)), **({"tool_calls": calls} if calls else {})}


def answer_of(answer: Answer, body: Mapping[str, object], *, created: int) -> dict[str, object]:
    """Return the answer as a message."""
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model", "policy"),
        "content": _blocks(answer),
        "stop_reason": "stop_sequence" if answer.stopped_at is not None else _STOP_REASONS[answer.finish],
        "stop_sequence": answer.stopped_at,
        "usage": _usage(answer),
    }


def _blocks(answer: Answer) -> list[dict[str, object]]:
    blocks: list[dict[str, object]] = [{"type": "text", "text": answer.text}] if answer.text else []
    blocks += [{"type": "tool_use", "id": c.id, "name": c.name, "input": dict(c.arguments)} for c in answer.tool_calls]
    return blocks


def _usage(answer: Answer) -> dict[str, int]:
    return {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens}


def stream_of(answer: Answer, body: Mapping[str, object], *, created: int) -> Iterator[Event]:
    """Yield (event, data) of the answer as a stream."""
    message = answer_of(answer, body, created=created)
    begun = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**_usage(answer), "output_tokens": 0}
    events: list[dict[str, object]] = [{"type": "message_start", "message": begun}]
    calls = iter(answer.tool_calls)
    for index, block in enumerate(_blocks(answer)):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": answer.text}
        else:
            empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": next(calls).json}
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        events.append({"type": "content_block_delta", "index": index, "delta": delta})
        events.append({"type": "content_block_stop", "index": index})
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    events.append({"type": "message_delta", "delta": ended, "usage": {"output_tokens": answer.completion_tokens}})
    events.append({"type": "message_stop"})
    for event in events:
        yield str(event["type"]), event


def error_of(message: str, *, status: int, param: str | None, code: str | None) -> dict[str, object]:
    """Return an error as this dialect reports it."""
    kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
    return {"type": "error", "error": {"type": kinds.get(status, "api_error"), "message": message}}
