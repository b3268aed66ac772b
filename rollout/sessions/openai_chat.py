"""OpenAI chat completions: requests, answers, streams and errors. Source: the OpenAPI description of OpenAI's API."""

from collections.abc import Iterator, Mapping

from rollout.data.chat_template import Message
from rollout.sessions.calls import Answer, Call, Event, messages_of, read, request_name, stop_of, text_of, tools_of


def read_call(body: Mapping[str, object]) -> Call:
    """Return what a request asks for. Raises CallError."""
    return Call(
        messages=messages_of(map(_message, read(body, "messages", list))),
        tools=tools_of(body),
        max_tokens=read(body, "max_completion_tokens", int, None) or read(body, "max_tokens", int, None),
        stop=stop_of(body.get("stop"), "stop"),
        name=request_name(body),
    )


def _message(message: Message) -> Message:
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    read_message: Message = {"role": role, "content": text_of(message.get("content"), ("text", "refusal"))}
    for key in ("tool_calls", "tool_call_id", "name"):
        if message.get(key):
            read_message[key] = message[key]
    return read_message


def answer_of(answer: Answer, body: Mapping[str, object], *, created: int) -> dict[str, object]:
    """Return the answer as a chat.completion."""
    choice = {
        "index": 0,
        "message": _written(answer),
        "finish_reason": answer.finish,
        "logprobs": _logprobs(answer) if body.get("logprobs") else None,
    }
    return {**_head(answer, body, created, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def stream_of(answer: Answer, body: Mapping[str, object], *, created: int) -> Iterator[Event]:
    """Yield (event, data) of the answer as a stream of chat.completion.chunk."""
    head = _head(answer, body, created, "chat.completion.chunk")
    written = _written(answer)
    calls = [{"index": i, **call} for i, call in enumerate(written.pop("tool_calls", []))]
    deltas: list[Message] = [{"role": "assistant", "content": ""}]
    deltas += [{key: written[key]} for key in ("reasoning_content", "content") if written.get(key)]
    deltas += [{"tool_calls": [call]} for call in calls]
    for delta in deltas:
        logprobs = _logprobs(answer) if body.get("logprobs") and delta is deltas[-1] else None
        yield None, {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": logprobs}]}
    yield None, {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish, "logprobs": None}]}
    options = body.get("stream_options")
    if isinstance(options, Mapping) and options.get("include_usage"):
        yield None, {**head, "choices": [], "usage": _usage(answer)}
    yield None, "[DONE]"


def error_of(message: str, *, status: int, param: str | None, code: str | None) -> dict[str, object]:
    """Return an error as this dialect reports it."""
    kind = {401: "authentication_error", 404: "not_found_error"}.get(status, "invalid_request_error")
    kind = "server_error" if status >= 500 else kind
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _head(answer: Answer, body: Mapping[str, object], created: int, kind: str) -> dict[str, object]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": created, "model": body.get("model", "policy")}


def _written(answer: Answer) -> Message:
    message: Message = {"role": "assistant", "content": answer.text or (None if answer.tool_calls else "")}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.json}}
            for call in answer.tool_calls
        ]
    return message


def _logprobs(answer: Answer) -> dict[str, object]:
    tokens = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in answer.logprobs()
    ]
    return {"content": tokens, "refusal": None}


def _usage(answer: Answer) -> dict[str, object]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
