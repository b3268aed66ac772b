"""Programs talk to the endpoint in three dialects, and every sampled token is trained once, as it was sampled."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import numpy as np
import pytest

from helpers.chat_tokenizer import Scripted, chat_tokenizer
from rollout.data.encoder import Encoder
from rollout.sessions.bridge import Bridge
from rollout.sessions.server import SessionServer
from rollout.sessions.session import Limits, Session
from rollout.types import Prompt, SamplingParams

TOKENIZER = chat_tokenizer()
BRIDGE = Bridge(Encoder(TOKENIZER))
PROMPT = Prompt(query_id="q", index=1, task="t", text="?", token_ids=np.array([5], np.int32), solutions=())
LIMITS = Limits(sampling=SamplingParams(max_new_tokens=200), context_tokens=2000)
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call>'


class Program:
    """A client of one session."""

    def __init__(self, server: SessionServer, session: Session, http: aiohttp.ClientSession) -> None:
        self.session, self.url = session, server.url
        self._http = http

    async def post(self, path: str, body: Any, *, token: str = "secret", **headers: str) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}"} | headers
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | headers
        async with self._http.post(f"{self.url}/v1/{path}", data=data, headers=headers) as response:
            kind = response.content_type
            return response.status, await (response.json() if kind == "application/json" else response.text())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._http.get(f"{self.url}/v1/{path}", headers={"Authorization": "Bearer secret"}) as response:
            kind = response.content_type
            return response.status, await (response.json() if kind == "application/json" else response.text())

    async def chat(self, *messages: Any, **others: Any) -> dict[str, Any]:
        status, body = await self.post("chat/completions", {"model": "gpt-x", "messages": list(messages), **others})
        assert status == 200, body
        return body

    def trained(self) -> list[list[str]]:
        """The trajectories as text, trained parts in brackets."""
        shown = []
        for t in self.session.trajectories(1.0, {}):
            edges = np.flatnonzero(np.diff(t.loss_mask, prepend=False, append=False))
            parts = np.split(t.token_ids, edges[edges < len(t.token_ids)])
            marks = [bool(t.loss_mask[sum(map(len, parts[:i]))]) for i in range(len(parts))]
            texts = [TOKENIZER.decode(part) for part in parts]
            shown.append([f"[{text}]" if mark else text for text, mark in zip(texts, marks, strict=True)])
        return shown


def talk(
    answer: Callable[[str], Any], program: Callable[[Program], Awaitable[Any]], *, generator: Scripted | None = None
) -> Scripted:
    """Run a program against a server with one session."""
    generator = generator or Scripted(TOKENIZER, answer)

    async def main() -> None:
        server = SessionServer()
        await server.start()
        session = Session(BRIDGE, generator, PROMPT, number=0, seed=1, limits=LIMITS)
        server.open("secret", session)
        try:
            async with aiohttp.ClientSession() as http:
                await program(Program(server, session, http))
        finally:
            await server.close()

    asyncio.run(main())
    return generator


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_conversation_is_continued_with_the_sampled_tokens_and_only_new_messages_are_tokenised() -> None:
    answers = iter(["<think>\nhm\n</think>\n\n one<|im_end|>", "two<|im_end|>"])

    async def program(p: Program) -> None:
        first = (await p.chat(user("1?")))["choices"][0]["message"]
        assert first == {"role": "assistant", "content": "one", "reasoning_content": "hm"}
        await p.chat(user("1?"), {"role": "assistant", "content": " one "}, user("2?"))  # without the thoughts
        assert p.trained() == [
            [
                "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n", "[<think>\nhm\n</think>\n\n one<|im_end|>]",
                "\n<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n", "[two<|im_end|>]",
            ]
        ]  # fmt: skip
        [t] = p.session.trajectories(0.5, {"turns": 2})
        assert (t.reward, t.rollout, t.metrics, t.finish_reason) == (0.5, 0, {"turns": 2}, "stop")
        assert (
            set(t.rollout_logprobs[t.loss_mask].tolist()) == {-0.5, -0.25}
            and not t.rollout_logprobs[~t.loss_mask].any()
        )

    generator = talk(lambda _: next(answers), program)
    assert [r.began_at for r in generator.requests] == [None, 3]


def test_an_answer_that_was_cut_off_is_ended_in_the_context() -> None:
    async def program(p: Program) -> None:
        choice = (await p.chat(user("?"), max_tokens=2))["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("ab", "length")
        await p.chat(user("?"), choice["message"], user("more"))
        [parts] = p.trained()
        assert parts[1:3] == ["[ab]", "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"]

    talk(lambda _: "abcdef<|im_end|>", program)


def test_tools_are_called_and_answered_also_in_parallel() -> None:
    answers = iter([f"Adding. {CALL}\n{CALL.replace('1', '3')}<|im_end|>", "3 and 5<|im_end|>"])

    async def program(p: Program) -> None:
        choice = (await p.chat(user("1+2, 3+2?"), tools=[ADD]))["choices"][0]
        message = choice["message"]
        assert (choice["finish_reason"], message["content"]) == ("tool_calls", "Adding.")
        calls = message["tool_calls"]
        assert [json.loads(c["function"]["arguments"]) for c in calls] == [{"b": 2, "a": 1}, {"b": 2, "a": 3}]
        assert len({c["id"] for c in calls}) == 2
        for call in calls:  # as clients do that parse and write the arguments anew
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True)
        results = [{"role": "tool", "tool_call_id": c["id"], "content": r} for c, r in zip(calls, "35", strict=True)]
        await p.chat(user("1+2, 3+2?"), message, *results, tools=[ADD])
        [parts] = p.trained()
        assert parts[2] == (
            "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert parts[3] == "[3 and 5<|im_end|>]"

    generator = talk(lambda _: next(answers), program)
    assert '"name": "add"' in TOKENIZER.decode(generator.requests[0].prompt_ids)


@pytest.mark.parametrize("written", ["<tool_call>{bad json</tool_call>", "<tool_call>{}</tool_call>", "<tool_call>"])
def test_a_malformed_tool_call_is_text(written: str) -> None:
    async def program(p: Program) -> None:
        choice = (await p.chat(user("?"), tools=[ADD]))["choices"][0]
        assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": written}, "stop")

    talk(lambda _: written + "<|im_end|>", program)


def test_edited_and_foreign_turns_begin_branches_and_shared_turns_are_trained_once() -> None:
    count = iter(range(100))

    async def program(p: Program) -> None:
        one = (await p.chat(user("a")))["choices"][0]["message"]
        two = (await p.chat(user("a"), one, user("b")))["choices"][0]["message"]
        await p.chat(user("a"), one, user("c"))  # a second question after the first answer
        await p.chat(user("a"), {"role": "assistant", "content": "edited"}, user("b"))
        await p.chat(user("sub-agent"))
        await p.chat(user("a"), one, user("b"), two, user("d"))
        lists = p.trained()
        assert len(lists) == 4
        sampled = [part for parts in lists for part in parts if part.startswith("[")]
        assert sorted(sampled) == [f"[answer {i}<|im_end|>]" for i in range(6)], "every answer once"
        begin, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
        assert lists[0] == [
            f"{begin}a{end}", "[answer 0<|im_end|>]", f"\n{begin}c{end}", "[answer 2<|im_end|>]",
        ]  # fmt: skip
        assert "edited<|im_end|>" in lists[1][0] and lists[2][0] == f"{begin}sub-agent{end}"
        assert lists[3] == [
            f"{begin}a{end}answer 0<|im_end|>\n{begin}b{end}", "[answer 1<|im_end|>]", f"\n{begin}d{end}",
            "[answer 5<|im_end|>]",
        ]  # fmt: skip
        rollouts = {t.rollout for t in p.session.trajectories(1.0, {})}
        assert rollouts == {0}

    talk(lambda _: f"answer {next(count)}<|im_end|>", program)


def test_the_same_question_twice_is_sampled_twice_and_a_retry_is_answered_from_the_record() -> None:
    count = iter(range(100))

    async def program(p: Program) -> None:
        body = {"model": "m", "messages": [user("?")]}
        answers = [(await p.post("chat/completions", body))[1] for _ in range(2)]
        status, again = await p.post("chat/completions", body, **{"x-stainless-retry-count": "1"})
        texts = [a["choices"][0]["message"]["content"] for a in (*answers, again)]
        assert texts == ["0", "1", "1"] and again["id"] == answers[1]["id"]
        assert len(p.session.trajectories(1.0, {})) == 2

    first = talk(lambda _: f"{next(count)}<|im_end|>", program)
    second = talk(lambda _: f"{next(count) % 10}<|im_end|>", lambda p: p.chat(user("?")))
    seeds = [r.seed for r in first.requests]
    assert len(set(seeds)) == 2 and second.requests[0].seed != seeds[0], "seeds follow from the whole request"


def test_a_client_that_went_away_gets_its_answer_when_it_asks_again() -> None:
    asked, slow = asyncio.Event(), asyncio.Event()

    class Slow(Scripted):
        async def generate(self, request: Any) -> Any:
            asked.set()
            await slow.wait()
            return await super().generate(request)

    async def program(p: Program) -> None:
        impatient = asyncio.ensure_future(p.chat(user("?")))
        await asked.wait()
        impatient.cancel()  # ends its connection
        with pytest.raises(asyncio.CancelledError):
            await impatient
        slow.set()
        while not p.session.num_turns:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # the server has found that nobody reads the answer
        assert (await p.chat(user("?")))["choices"][0]["message"]["content"] == "late"
        assert p.session.num_turns == 1

    generator = Slow(TOKENIZER, lambda _: "late<|im_end|>")
    talk(lambda _: "", program, generator=generator)
    assert len(generator.requests) == 1


def test_stop_texts_of_the_client_end_the_answer_and_what_follows_is_not_trained() -> None:
    async def program(p: Program) -> None:
        choice = (await p.chat(user("?"), stop=["\nObservation:"]))["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Act", "stop")
        await p.chat(user("?"), choice["message"], user("Observation: 3"))
        [parts] = p.trained()
        assert parts[1] == "[Act\nObservation:]" and parts[2].startswith("<|im_end|>\n<|im_start|>user\nObservation: 3")

    talk(lambda _: "Act\nObservation: made up<|im_end|>", program)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"n": 2}, "n=2 is not supported: ask once for each answer."),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs=3 is not supported"),
        ({"tool_choice": "required"}, "tool_choice='required' is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format='json_object' is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias={'5': 1} is not supported: the policy is sampled as it is trained."),
        ({"logprobs": True, "model": "gpt-x"}, "ask for model='policy', not 'gpt-x'"),
        ({"messages": "hi"}, "messages must be of type list, got str."),
        ({"messages": []}, 'messages: "messages" must be a list of messages'),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content of type 'image_url'"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages: there is no role 'wizard'."),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "maximum context length is 2000 tokens"),
        ({"max_tokens": "many"}, "max_tokens must be of type int, got str."),
        ({"tools": [{"type": "web_search"}]}, "tools: only functions are supported"),
        ({"stop": [1]}, "stop must be a text or a list of texts"),
        ({"stop": 5}, "stop must be a text or a list of texts"),
        ({"max_tokens": -5}, "max_tokens=-5: it must be at least 1."),
        ({"max_completion_tokens": 0}, "max_completion_tokens=0: it must be at least 1."),
    ],
)
def test_what_cannot_be_done_is_refused_in_the_format_of_openai(body: dict[str, Any], said: str) -> None:
    async def program(p: Program) -> None:
        status, answer = await p.post("chat/completions", {"model": "m", "messages": [user("?")], **body})
        assert status == 400 and answer["error"]["type"] == "invalid_request_error"
        assert said in answer["error"]["message"]

    assert not talk(lambda _: "x", program).requests


@pytest.mark.parametrize("body", [b"", b"\xff", b"{", b"[" * 100_000, b'{"a":' * 100_000])
def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    async def program(p: Program) -> None:
        status, answer = await p.post("chat/completions", body)
        assert status == 400 and answer["error"]["message"].startswith("The body is no JSON: ")

    assert not talk(lambda _: "x", program).requests


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}},
            "text.format='json_schema'",
        ),
        ("responses", {"include": ["message.output_text.logprobs"]}, "include=['message.output_text.logprobs']"),
        ("responses", {"previous_response_id": "resp_1"}, "id 'resp_1' not found"),
        ("responses", {"conversation": "conv_1"}, "send previous_response_id"),
        ("responses", {"input": "x" * 2000}, "maximum context length is 2000 tokens"),
        ("messages", {"messages": [{"role": "user", "content": "x" * 2000}]}, "maximum context length is 2000 tokens"),
        ("responses", {"input": [{"role": "wizard", "content": "x"}]}, "input: there is no role 'wizard'."),
        ("messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config={'format': {"),
        ("messages", {"tool_choice": {"type": "any"}}, "tool_choice='any' is not supported"),
        ("responses", {"max_output_tokens": 0}, "max_output_tokens=0: it must be at least 1."),
        ("messages", {"n": 2}, "n=2 is not supported: ask once for each answer."),
        ("messages", {"messages": [{"role": "user", "content": ["?"]}]}, "The request is malformed: AttributeError"),
    ],
)
def test_what_the_other_dialects_cannot_do_is_refused(path: str, body: dict[str, Any], said: str) -> None:
    async def program(p: Program) -> None:
        given = {"model": "m", "max_tokens": 5, "messages": [user("?")], "input": "?", **body}
        status, answer = await p.post(path, given)
        assert status == 400 and said in answer["error"]["message"]
        assert path == "messages" or answer["error"]["param"] == next(iter(body)).replace("text", "text.format")

    assert not talk(lambda _: "x", program).requests


def test_requests_with_one_idempotency_key_have_one_answer() -> None:
    count = iter(range(100))

    async def program(p: Program) -> None:
        body = {"model": "m", "messages": [user("?")], "stream": True}
        keys = ("a", "a", "b", "a")
        streams = [await p.post("chat/completions", body, **{"Idempotency-Key": key}) for key in keys]
        deltas = [[c["choices"][0]["delta"] for _, c in events(text) if c != "[DONE]"] for _, text in streams]
        assert ["".join(d.get("content", "") for d in of) for of in deltas] == ["0", "0", "1", "0"]
        assert p.session.num_turns == 2

    talk(lambda _: f"{next(count)}<|im_end|>", program)


def test_tokens_of_no_session_unknown_paths_and_failures_of_the_policy_have_their_status() -> None:
    async def program(p: Program) -> None:
        body = {"model": "m", "max_tokens": 5, "messages": [user("?")]}
        status, answer = await p.post("chat/completions", body, token="other")
        assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        status, answer = await p.post("messages", body, **{"x-api-key": "other"})
        assert status == 401 and answer["error"]["type"] == "authentication_error" and answer["type"] == "error"
        status, answer = await p.post("embeddings", body)
        assert status == 404 and "there are POST /v1/chat/completions" in answer["error"]["message"]
        status, answer = await p.post("chat/completions", body)
        assert (
            status == 500 and answer["error"]["type"] == "server_error" and "no weights" in answer["error"]["message"]
        )
        assert isinstance(p.session.error, RuntimeError)
        status, answer = await p.post("messages", {**body, "messages": [user("x" * 2000)]})
        assert status == 400 and answer["error"]["type"] == "invalid_request_error"

    talk(lambda _: RuntimeError("no weights"), program)


def events(text: str) -> list[tuple[str | None, Any]]:
    found = []
    for block in text.strip().replace(": waiting\n\n", "").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        found.append((lines.get("event"), lines["data"] if lines["data"] == "[DONE]" else json.loads(lines["data"])))
    return found


def test_streams_have_the_whole_answer_in_each_dialect() -> None:
    async def program(p: Program) -> None:
        tools = [ADD]
        body = {"model": "m", "messages": [user("?")], "stream": True, "stream_options": {"include_usage": True}}
        _, text = await p.post("chat/completions", {**body, "tools": tools})
        chunks = [data for _, data in events(text)]
        assert chunks[-1] == "[DONE]" and chunks[-2]["usage"]["completion_tokens"] > 10
        deltas = [c["choices"][0]["delta"] for c in chunks[:-2]]
        assert "".join(d.get("content") or "" for d in deltas) == "Well."
        assert [d["tool_calls"][0]["function"]["name"] for d in deltas if "tool_calls" in d] == ["add"]
        tool = {"name": "add", "input_schema": {"type": "object"}}
        _, text = await p.post(
            "messages", {"model": "m", "max_tokens": 99, "messages": [user("?")], "tools": [tool], "stream": True}
        )
        named = events(text)
        assert [name for name, _ in named][0 :: len(named) - 1] == ["message_start", "message_stop"]
        assert named[-2][1]["delta"]["stop_reason"] == "tool_use"
        assert json.loads(
            next(d["delta"]["partial_json"] for _, d in named if d.get("delta", {}).get("type") == "input_json_delta")
        ) == {"a": 1, "b": 2}
        flat = {"type": "function", **ADD["function"]}
        _, text = await p.post("responses", {"model": "m", "input": "?", "tools": [flat], "stream": True})
        named = events(text)
        assert [e["sequence_number"] for _, e in named] == list(range(len(named)))
        done = named[-1][1]["response"]
        assert named[-1][0] == "response.completed" and [i["type"] for i in done["output"]] == [
            "message",
            "function_call",
        ]

    talk(lambda _: f"Well. {CALL}<|im_end|>", program)


def test_anthropic_and_responses_continue_their_conversations() -> None:
    answers = [f"Hm. {CALL}<|im_end|>", "three<|im_end|>"]

    async def program(p: Program) -> None:
        tool = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
        body = {"model": "m", "max_tokens": 99, "system": [{"type": "text", "text": "Sys"}], "tools": [tool]}
        _, first = await p.post("messages", {**body, "messages": [user("1+2?")]})
        assert (first["stop_reason"], first["role"]) == ("tool_use", "assistant")
        result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": "3"}
        turns = [user("1+2?"), {"role": "assistant", "content": first["content"]}, user([result])]  # type: ignore[arg-type]
        _, second = await p.post("messages", {**body, "messages": turns})
        assert second["content"] == [{"type": "text", "text": "three"}] and second["stop_reason"] == "end_turn"
        _, count = await p.post("messages/count_tokens", {**body, "messages": turns})
        assert count == {"input_tokens": second["usage"]["input_tokens"]}

        flat = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}}
        body = {"model": "m", "instructions": "Other", "tools": [flat]}
        _, first = await p.post("responses", {**body, "input": "1+2?"})
        output = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "3"}
        _, second = await p.post("responses", {**body, "input": [user("1+2?"), *first["output"], output]})
        assert second["output"][0]["content"][0]["text"] == "three" and second["status"] == "completed"
        lists = p.trained()
        assert len(lists) == 2 and all(
            [p for p in parts if p[0] == "["] == [f"[{a}]" for a in answers] for parts in lists
        )

    talk(lambda text: answers["<tool_response>" in text], program)


def test_a_response_continues_an_earlier_one_by_its_id_and_is_read_again() -> None:
    answers = iter([f"Hm. {CALL}<|im_end|>", "three<|im_end|>"])

    async def program(p: Program) -> None:
        body = {"model": "m", "tools": [{"type": "function", **ADD["function"]}]}
        _, first = await p.post("responses", {**body, "instructions": "Add.", "input": "1+2?"})
        output = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "3"}
        again = {"previous_response_id": first["id"], "input": [output], "instructions": "Add."}
        _, second = await p.post("responses", {**body, **again})
        [parts] = p.trained()
        assert [part for part in parts if part[0] == "["] == [f"[Hm. {CALL}<|im_end|>]", "[three<|im_end|>]"]
        assert parts[0].count("Add.") == 1 and "<tool_response>\n3\n" in parts[2]
        assert await p.get(f"responses/{first['id']}") == (200, first)
        assert await p.get(f"responses/{second['id']}") == (200, second)
        assert (await p.get("responses/resp_x"))[0] == 404
        assert (await p.get(f"responses/{first['id']}?stream=true&starting_after=x"))[0] == 400

    talk(lambda _: next(answers), program)


def test_a_stream_of_a_response_that_broke_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.sessions.server._PING_SECONDS", 0.01)
    slow = asyncio.Event()

    class Slow(Scripted):
        async def generate(self, request: Any) -> Any:
            await slow.wait()
            return await super().generate(request)

    async def program(p: Program) -> None:
        headers, body = {"Authorization": "Bearer secret"}, {"model": "m", "input": "?", "stream": True}
        async with p._http.post(f"{p.url}/v1/responses", json=body, headers=headers) as broken:
            seen = events((await broken.content.readuntil(b": waiting")).decode().removesuffix(": waiting"))
        assert [name for name, _ in seen] == ["response.created", "response.in_progress"]
        id = seen[0][1]["response"]["id"]
        rest = asyncio.create_task(p.get(f"responses/{id}?stream=true&starting_after=1"))
        await asyncio.sleep(0.05)
        slow.set()
        numbers = [e["sequence_number"] for _, e in events((await rest)[1])]
        assert numbers == list(range(2, 2 + len(numbers))) and p.session.num_turns == 1
        whole = events((await p.get(f"responses/{id}?stream=true"))[1])
        assert whole[:2] == seen and whole[-1][1]["response"]["output"][0]["content"][0]["text"] == "late"

    talk(lambda _: "", program, generator=Slow(TOKENIZER, lambda _: "late<|im_end|>"))


def test_the_first_of_several_stop_texts_ends_the_answer() -> None:
    bridge = Bridge(Encoder(TOKENIZER))
    tokens = TOKENIZER.encode("one two three two", add_special_tokens=False)
    for stop, text in ((["three", "two"], "one two"), (["four"], "one two three two"), (["o", "two"], "o")):
        end, found = bridge.cut(tokens, stop)
        assert (end, found) == first_cut(bridge, tokens, stop), stop
        assert bridge.text(tokens[:end]).startswith(text)


def first_cut(bridge: Bridge, tokens: list[int], stop: list[str]) -> tuple[int, str | None]:
    """What Bridge.cut() returns, found token by token."""
    for end in range(1, len(tokens) + 1):
        if found := next((s for s in stop if s in bridge.text(tokens[:end])), None):
            return end, found
    return len(tokens), None
