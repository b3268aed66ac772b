"""OpenAI responses: requests, answers, streams and errors. Source: the OpenAPI description of OpenAI's API."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from rollout.data.chat_template import Message
from rollout.sessions import openai_chat
from rollout.sessions.calls import Answer, Call, CallError, Event, messages_of, read, request_name, text_of, tools_of
from rollout.sessions.session import Asked

_ID = "resp_"
"""What ids of responses begin with."""
_TEXTS = ("input_text", "output_text", "text", "refusal")


def read_call(body: Mapping[str, object]) -> Call:
    """Return what a request asks for. Raises CallError."""
    read(body, "previous_response_id", str, None)
    instructions = read(body, "instructions", str, None)
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        messages += _messages(read(body, "input", list))
    return Call(
        messages=messages_of(messages, "input"),
        tools=tools_of(body),
        max_tokens=read(body, "max_output_tokens", int, None),
        name=request_name(body),
    )


def error_of(message: str, *, status: int, param: str | None, code: str | None) -> dict[str, object]:
    """Return an error as this dialect reports it."""
    param = "input" if param == "messages" else param
    return openai_chat.error_of(message, status=status, param=param, code=code)


async def continued(call: Call, body: Mapping[str, object], find: Callable[[str], Asked | None]) -> Call:
    """Put the conversation up to previous_response_id, without its instructions, before the input of a request.
    Raises CallError."""
    before = find(name_of(id := read(body, "previous_response_id", str)))
    if before is None:
        code = "previous_response_not_found"
        raise CallError(f"Previous response with id {id!r} not found.", param="previous_response_id", code=code)
    await asyncio.wait([before.answer])
    if before.answer.cancelled() or before.answer.exception() is not None:
        raise CallError("previous_response_id: that response failed.", param="previous_response_id")
    old, new = bool(before.body.get("instructions")), bool(body.get("instructions"))
    messages = (*call.messages[:new], *before.call.messages[old:], before.answer.result().message, *call.messages[new:])
    return replace(call, messages=messages)


def name_of(id: str) -> str:
    """Return the id of the answer that a response has."""
    return id.removeprefix(_ID)


def _messages(items: Sequence[object]) -> Iterator[Message]:
    """Yield messages; the items that one answer consists of, a message and calls of tools, are one."""
    answer: Message | None = None
    for item in items:
        if not isinstance(item, Mapping):
            raise CallError(f"input of type {type(item).__name__!r} is not supported.", param="input")
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind == "function_call":
            call = {"id": item.get("call_id"), "type": "function"}
            call["function"] = {"name": item.get("name"), "arguments": item.get("arguments")}
            answer = answer or {"role": "assistant", "content": ""}
            answer.setdefault("tool_calls", []).append(call)
            continue
        is_answer = kind == "message" and item.get("role") == "assistant"
        if answer is not None:
            yield answer
            answer = None
        if is_answer:
            answer = {"role": "assistant", "content": text_of(item.get("content"), _TEXTS)}
        elif kind == "message":
            role = item.get("role")
            yield {"role": "system" if role == "developer" else role, "content": text_of(item.get("content"), _TEXTS)}
        elif kind == "function_call_output":
            text = text_of(item.get("output"), _TEXTS)
            yield {"role": "tool", "content": text, "tool_call_id": str(item.get("call_id", ""))}
        else:
            raise CallError(f"input of type {kind!r} is not supported.", param="input")
    if answer is not None:
        yield answer


def answer_of(answer: Answer, body: Mapping[str, object], *, created: int) -> dict[str, object]:
    """Return the answer as a response."""
    length = answer.finish == "length"
    response = _response(answer.id, body, created, status="incomplete" if length else "completed")
    response["incomplete_details"] = {"reason": "max_output_tokens"} if length else None
    response["output"] = _items(answer)
    response["usage"] = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
    return response


def _response(id: str, body: Mapping[str, object], created: int, *, status: str) -> dict[str, object]:
    return {
        "id": _ID + id, "object": "response", "created_at": created, "status": status, "error": None,
        "incomplete_details": None, "instructions": body.get("instructions"), "metadata": body.get("metadata") or {},
        "model": body.get("model", "policy"), "output": [], "parallel_tool_calls": True, "temperature": 1.0,
        "tool_choice": body.get("tool_choice", "auto"), "tools": body.get("tools") or [], "top_p": 1.0, "usage": None,
    }  # fmt: skip


def _items(answer: Answer) -> list[dict[str, object]]:
    items: list[dict[str, object]] = []
    if answer.text or not answer.tool_calls:
        about = {"type": "message", "status": "completed", "role": "assistant", "content": [_text(answer)]}
        items.append({"id": f"msg_{answer.id}", **about})
    items += [
        {
            "id": f"fc_{call.id}", "type": "function_call", "status": "completed", "call_id": call.id,
            "name": call.name, "arguments": call.json,
        }
        for call in answer.tool_calls
    ]  # fmt: skip
    return items


def _text(answer: Answer) -> dict[str, object]:
    return {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}


def stream_of(answer: Answer, body: Mapping[str, object], *, created: int) -> Iterator[Event]:
    """Yield (event, data) of the answer as a stream."""
    done = answer_of(answer, body, created=created)
    events: list[dict[str, object]] = []
    for index, item in enumerate(_items(answer)):
        at = {"item_id": item["id"], "output_index": index}
        empty: dict[str, object] = {"content": []} if "content" in item else {"arguments": ""}
        begins = {**item, "status": "in_progress", **empty}
        events.append({"type": "response.output_item.added", "output_index": index, "item": begins})
        events += _parts(answer, item, at)
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{done['status']}", "response": done})
    yield from begun(answer.id, body, created)
    for number, event in enumerate(events, 2):
        yield str(event["type"]), {**event, "sequence_number": number}


def begun(id: str, body: Mapping[str, object], created: int) -> Iterator[Event]:
    """Yield the events of a stream that come before the answer."""
    response = _response(id, body, created, status="in_progress")
    for number, name in enumerate(("response.created", "response.in_progress")):
        yield name, {"type": name, "response": response, "sequence_number": number}


def _parts(answer: Answer, item: Mapping[str, object], at: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the events of the content of an item."""
    if item["type"] == "function_call":
        arguments = item["arguments"]
        return [
            {"type": "response.function_call_arguments.delta", **at, "delta": arguments},
            {"type": "response.function_call_arguments.done", **at, "arguments": arguments, "name": item["name"]},
        ]
    part = _text(answer)
    at = {**at, "content_index": 0}
    return [
        {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **at, "delta": answer.text, "logprobs": []},
        {"type": "response.output_text.done", **at, "text": answer.text, "logprobs": []},
        {"type": "response.content_part.done", **at, "part": part},
    ]
