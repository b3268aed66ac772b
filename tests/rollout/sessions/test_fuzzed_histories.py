"""Random clients: they call tools, summarise, retry, edit, ask in parallel. Whatever they do, every sampled token is
trained once, as a continuation of exactly what the policy read, and no other token is trained."""

import asyncio
import copy
import json
import random
from typing import Any

import numpy as np
import pytest

from helpers.chat_tokenizer import chat_tokenizer
from rollout.data.encoder import Encoder
from rollout.sessions import anthropic_messages, openai_chat, openai_responses
from rollout.sessions.bridge import Bridge
from rollout.sessions.calls import CallError
from rollout.sessions.session import Limits, Session
from rollout.types import Completion, GenerateRequest, Prompt, SamplingParams

TOKENIZER = chat_tokenizer()
BRIDGE = Bridge(Encoder(TOKENIZER))
PROMPT = Prompt(query_id="q", index=1, task="t", text="?", token_ids=np.array([5], np.int32), solutions=())
LIMITS = Limits(sampling=SamplingParams(max_new_tokens=60), context_tokens=700)
TOOLS = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("add", "find")]
TEXTS = (
    "Hi.",
    "  two  ",
    "ünïcödé 漢字 🎉",
    "",
    "<think>\nhm\n</think>\n\nWell.",
    "<tool_call>{broken",
    "line\n\n",
    "0",
)
CALLS = (
    '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": "é"}}\n</tool_call>',
    '<tool_call>\n{"arguments": {}, "name": "find"}\n</tool_call>',
)


class Policy:
    """Answers at random; the log-probability of a token is the number of the token, so that it is known again."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sampled: dict[float, tuple[list[int], int]] = {}  # number -> (all tokens up to it, the token)
        self.count = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        for _ in range(self.rng.randint(0, 3)):
            await asyncio.sleep(0)
        text = self.rng.choice(TEXTS) + "".join(self.rng.choices(CALLS, k=self.rng.choice((0, 0, 1, 2))))
        ids = TOKENIZER.encode(text + "<|im_end|>", add_special_tokens=False)
        limit = min(request.sampling.max_new_tokens, self.rng.choice((1, 5, 60, 60)))  # also inside of a character
        is_cut, ids = len(ids) > limit, ids[:limit]
        numbers = [-(self.count + i + 1) / 4096 for i in range(len(ids))]
        self.count += len(ids)
        prefix = list(request.prompt_ids)
        for number, token in zip(numbers, ids, strict=True):
            self.sampled[number] = list(prefix), token
            prefix.append(token)
        return Completion(
            token_ids=np.array(ids, np.int32), logprobs=np.array(numbers, np.float32),
            versions=np.zeros(len(ids), np.int32), finish_reason="length" if is_cut else "stop",
        )  # fmt: skip


class Client:
    """A program that keeps a history in the form of OpenAI's chat completions, and does to it what programs do."""

    def __init__(self, session: Session, rng: random.Random) -> None:
        self.session, self.rng = session, rng
        self.history: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]

    async def turn(self) -> None:
        await self.rng.choice(
            (self.ask, self.ask, self.ask, self.ask, self.twice, self.retry, self.edit, self.summarise, self.restart)
        )()

    async def ask(self, *, keep: bool = True, retry: bool = False) -> None:
        dialect = self.rng.choice((openai_chat, openai_chat, anthropic_messages, openai_responses))
        body = BODIES[dialect](self.history)
        if self.rng.random() < 0.2:
            body["max_output_tokens" if dialect is openai_responses else "max_tokens"] = self.rng.randint(1, 8)
        call = dialect.read_call(json.loads(json.dumps(body)))
        try:
            asked = self.session.ask(call, {}, is_retry=retry)
            if self.rng.random() < 0.1:  # the connection ended; the client asks again
                asked.was_lost = True
                assert self.session.ask(call, {}, is_retry=False) is asked
            message = copy.deepcopy((await asked.answer).message)
        except CallError:  # the context is full
            self.history = self.history[:1]
            return
        if keep:
            self.keep(message)

    def keep(self, message: dict[str, Any]) -> None:
        """Append an answer as clients do, with its results or the next question."""
        content = message["content"]
        message["content"] = self.rng.choice((content, content.strip(), f" {content}\n"))
        calls = message.get("tool_calls", [])
        for call in calls:
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(dict(sorted(arguments.items(), reverse=self.rng.random() < 0.5)))
        self.history.append(message)
        for call in calls:
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": self.rng.choice(TEXTS)})
        if not calls or self.rng.random() < 0.2:
            self.history.append({"role": "user", "content": self.rng.choice(TEXTS)})

    async def twice(self) -> None:
        before = copy.deepcopy(self.history)
        await asyncio.gather(self.ask(keep=False), self.ask(keep=False))
        self.history = before

    async def retry(self) -> None:
        await self.ask(keep=False)
        await self.ask(retry=True)

    async def edit(self) -> None:
        answers = [i for i, m in enumerate(self.history) if m["role"] == "assistant"]
        if answers:
            at = self.rng.choice(answers)
            self.history[at] = {"role": "assistant", "content": self.rng.choice(TEXTS)}
            self.history = self.history[: at + 1] + [{"role": "user", "content": "Again."}]
        await self.ask()

    async def summarise(self) -> None:
        self.history = [{"role": "system", "content": "Before: ..."}, {"role": "user", "content": "Go on."}]
        await self.ask()

    async def restart(self) -> None:
        at = self.rng.choice([i for i, m in enumerate(self.history) if m["role"] == "user"])
        self.history = self.history[: at + 1]
        await self.ask()


def _chat(history: list[dict[str, Any]]) -> dict[str, Any]:
    return {"model": "m", "messages": copy.deepcopy(history), "tools": TOOLS}


def _anthropic(history: list[dict[str, Any]]) -> dict[str, Any]:
    messages = []
    for message in history:
        if message["role"] == "tool":
            part = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            messages.append({"role": "user", "content": [part]})
        elif message["role"] != "system":
            parts = [{"type": "text", "text": message["content"]}] if message["content"] else []
            for call in message.get("tool_calls", []):
                function = call["function"]
                arguments = json.loads(function["arguments"])
                parts.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
            messages.append({"role": message["role"], "content": parts or ""})
    tools = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
    system = [m["content"] for m in history if m["role"] == "system"]
    return {"model": "m", "messages": messages, "tools": tools, **({"system": system[0]} if system else {})}


def _responses(history: list[dict[str, Any]]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for message in history:
        if message["role"] == "tool":
            text, call_id = message["content"], message["tool_call_id"]
            items.append({"type": "function_call_output", "call_id": call_id, "output": text})
            continue
        if message["content"] or not message.get("tool_calls"):
            items.append({"role": message["role"], "content": message["content"]})
        for call in message.get("tool_calls", []):
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return {"model": "m", "input": items, "tools": [{"type": "function", **t["function"]} for t in TOOLS]}


BODIES: dict[Any, Any] = {openai_chat: _chat, anthropic_messages: _anthropic, openai_responses: _responses}


def check_history(seed: int) -> int:
    """Run one client and check what is trained; return the number of its branches."""
    rng = random.Random(seed)
    policy = Policy(rng)

    async def main() -> Session:
        session = Session(BRIDGE, policy, PROMPT, number=0, seed=seed, limits=LIMITS)
        clients = [Client(session, rng) for _ in range(rng.choice((1, 1, 2)))]  # a second one is a sub-agent
        for _ in range(rng.randint(1, 8)):
            await asyncio.gather(*(client.turn() for client in clients))
        await session.close()
        return session

    session = asyncio.run(main())
    if not policy.sampled:
        return 0
    trained: list[float] = []
    found = session.trajectories(1.0, {})
    for t in found:
        ids = t.token_ids.tolist()
        for place in np.flatnonzero(t.loss_mask).tolist():
            number = float(t.rollout_logprobs[place])
            trained.append(number)
            assert policy.sampled[number] == (ids[:place], ids[place]), f"seed {seed}: not what the policy read"
    assert sorted(trained) == sorted(policy.sampled), f"seed {seed}: not every sampled token is trained once"
    return len(found)


def test_every_sampled_token_is_trained_once_and_no_other() -> None:
    branches = [check_history(seed) for seed in range(120)]
    assert max(branches) > 4 and 1 in branches


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_histories_train_every_sampled_token_once() -> None:
    for seed in range(1000, 101_000):
        check_history(seed)
