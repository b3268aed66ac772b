"""One session: a program talks to the policy, and what it was answered becomes trajectories.

Conversations form a tree of turns. A request whose messages begin with those of an earlier answer extends it, with the
tokens that were sampled; any other one begins a branch. Invariant: every sampled token is in one trajectory to be
trained, whatever the program does with it; what others wrote is context.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rollout.data.chat_template import Message, Messages, Tools
from rollout.sessions.bridge import Bridge
from rollout.sessions.calls import Answer, Call, CallError, ToolCall, said
from rollout.trajectories import TrajectoryBuilder, sample_seed
from rollout.types import Completion, GenerateRequest, Prompt, Sampler, SamplingParams, Trajectory


@dataclass(eq=False, kw_only=True)
class _Turn:
    """An answer, with the tokens between the one before and it."""

    parent: _Turn | None
    added: Sequence[int]
    completion: Completion
    message: Message

    @property
    def path(self) -> list[_Turn]:
        """The turns from the first to this one."""
        turns = [self]
        while turns[-1].parent is not None:
            turns.append(turns[-1].parent)
        return turns[::-1]

    @property
    def token_ids(self) -> list[int]:
        return [t for turn in self.path for t in (*turn.added, *turn.completion.token_ids.tolist())]

    @property
    def began_at(self) -> int | None:
        """The version of the weights that sampled the first token of the path."""
        return next((int(turn.completion.versions[0]) for turn in self.path if len(turn.completion.versions)), None)


@dataclass(eq=False, kw_only=True)
class Asked:
    """One request and its answer; clients may ask for it again."""

    id: str
    """Of the answer."""
    call: Call
    body: Mapping[str, object]
    """The request as it came."""
    answer: asyncio.Task[Answer]
    created: int
    was_lost: bool = False
    """The connection ended before the client had it."""


@dataclass(kw_only=True)
class Limits:
    """What a session may use."""

    sampling: SamplingParams
    context_tokens: int
    """Prompt and answer together have at most this many."""


class Session:
    """What one program asks the policy, as rollout `number` of its prompt."""

    def __init__(
        self, bridge: Bridge, sampler: Sampler, prompt: Prompt, *, number: int, seed: int, limits: Limits
    ) -> None:
        self._bridge, self._sampler, self._prompt = bridge, sampler, prompt
        self._number, self._seed, self._limits = number, seed, limits
        self._context = contextvars.copy_context()  # requests arrive in tasks of the server
        self._turns: list[_Turn] = []
        self._known: dict[str, _Turn] = {}  # by what was said up to and with the answer
        self._asked: dict[str, list[Asked]] = {}
        self.error: Exception | None = None
        """Why the policy could not answer."""

    def ask(self, call: Call, body: Mapping[str, object], *, is_retry: bool) -> Asked:
        """Begin to answer. A client that asks again, as its connection ended, gets the answer of before."""
        asked = self._asked.setdefault(call.name, [])
        lost = [one for one in asked if one.was_lost] or (asked[-1:] if is_retry else [])
        if lost:
            lost[0].was_lost = False
            return lost[0]
        name = hashlib.blake2b(f"{call.name}/{len(asked)}".encode(), digest_size=12).hexdigest()
        answer = asyncio.create_task(self._answer(call, name), context=self._context.copy())
        asked.append(Asked(id=name, call=call, body=body, answer=answer, created=int(time.time())))
        return asked[-1]

    def find(self, id: str) -> Asked | None:
        """Return the request with the answer `id`."""
        return next((asked for of in self._asked.values() for asked in of if asked.id == id), None)

    def count(self, messages: Messages, tools: Tools) -> int:
        """Return the number of tokens of a prompt."""
        return len(self._place(messages, tools)[2])

    async def _answer(self, call: Call, name: str) -> Answer:
        parent, added, prompt_ids = self._place(call.messages, call.tools)
        room = self._limits.context_tokens - len(prompt_ids)
        if room < 1:
            raise CallError(
                f"This model's maximum context length is {self._limits.context_tokens} tokens. The conversation has "
                f"{len(prompt_ids)} tokens and leaves none for an answer.",
                param="messages", code="context_length_exceeded",
            )  # fmt: skip
        sampling = self._limits.sampling.at_most(min(room, call.max_tokens or room))
        prompt = self._prompt
        group_id = f"{prompt.query_id}/{prompt.epoch}/{self._number}"
        request = GenerateRequest(
            request_id=f"{group_id}/{name}/{id(self)}",
            group_id=group_id,
            is_turn=True,
            began_at=None if parent is None else parent.began_at,
            prompt_ids=prompt_ids,
            sampling=sampling,
            seed=sample_seed(self._seed, prompt.epoch, prompt.index, self._number, int(name[:15], 16)),
        )
        try:
            completion = await self._sampler.generate(request)
        except Exception as error:
            self.error = self.error or error
            raise
        return self._keep(parent, added, completion, call, name, len(prompt_ids))

    def _place(self, messages: Messages, tools: Tools) -> tuple[_Turn | None, list[int], list[int]]:
        """Return the turn that a conversation extends, the tokens that it adds, and all tokens up to the answer."""
        names = _names(messages, tools)
        for end in range(len(messages) - 1, 0, -1):
            new = messages[end:]
            if new[0]["role"] == "assistant":
                break  # written by someone else: the conversation is a branch of its own
            if (turn := self._known.get(names[end - 1])) is not None:
                added = self._bridge.following(turn.message, turn.completion.token_ids.tolist(), new, tools)
                return turn, added, [*turn.token_ids, *added]
        prompt_ids = self._bridge.prompt(messages, tools)
        return None, prompt_ids, prompt_ids

    def _keep(
        self, parent: _Turn | None, added: list[int], completion: Completion, call: Call, name: str, num_prompt: int
    ) -> Answer:
        stopped_at = None
        if call.stop:
            end, stopped_at = self._bridge.cut(completion.token_ids.tolist(), call.stop)
            if stopped_at is not None:
                completion = _first(completion, end)
        text = self._bridge.text(completion.token_ids.tolist())
        if stopped_at is not None:
            text = text[: text.index(stopped_at)]
        reasoning, text, calls = self._bridge.read(text, call.tools)
        before = sum(len(message.get("tool_calls") or ()) for message in call.messages)
        ids = [self._bridge.call_id(n, before + i, otherwise=f"call{name[:16]}{i}") for i, (n, _) in enumerate(calls)]
        tool_calls = [ToolCall(id=id_, name=n, arguments=a) for id_, (n, a) in zip(ids, calls, strict=True)]
        answer = Answer(
            id=name,
            text=text,
            reasoning=reasoning,
            tool_calls=tool_calls,
            finish="length" if completion.finish_reason == "length" else "tool_calls" if tool_calls else "stop",
            stopped_at=stopped_at,
            prompt_tokens=num_prompt,
            completion_tokens=len(completion.token_ids),
            logprobs=lambda: [
                (self._bridge.text([t]), float(p))
                for t, p in zip(completion.token_ids, completion.logprobs, strict=True)
            ],
        )
        turn = _Turn(parent=parent, added=added, completion=completion, message=answer.message)
        self._turns.append(turn)
        self._known[_names((*call.messages, answer.message), call.tools)[-1]] = turn
        return answer

    @property
    def last_text(self) -> str:
        """Text of the last answer; empty where nothing was asked."""
        return self._turns[-1].message["content"] if self._turns else ""

    def trajectories(self, reward: float, metrics: Mapping[str, float]) -> list[Trajectory]:
        """Return one trajectory for each branch; turns that branches share are trained in the first of them. Raises
        ValueError where the program asked for nothing."""
        if not self._turns:
            raise ValueError(f"{self._prompt.query_id}: the program ended without a request to the policy")
        trained: set[int] = set()
        built = []
        continued = {id(turn.parent) for turn in self._turns}
        for leaf in (turn for turn in self._turns if id(turn) not in continued):
            sample = TrajectoryBuilder(self._prompt, number=self._number, start=())
            for turn in leaf.path:
                sample.observed(turn.added)
                if id(turn) in trained:
                    sample.observed(turn.completion.token_ids.tolist())
                else:
                    sample.sampled(turn.completion)
                    trained.add(id(turn))
            built.append(sample.build(reward, metrics))
        return built

    async def close(self) -> None:
        """Cancel what is still asked for."""
        tasks = [asked.answer for of in self._asked.values() for asked in of]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_turns(self) -> int:
        return len(self._turns)


def _names(messages: Messages, tools: Tools) -> list[str]:
    """Return what identifies the conversation up to and with each message."""
    digest = hashlib.blake2b(repr(tools).encode(), digest_size=16)
    names = []
    for message in messages:
        digest.update(said(message).encode() + b"\\0")
        names.append(digest.hexdigest())
    return names


def _first(completion: Completion, end: int) -> Completion:
    """Return the first tokens of a completion, as if it had ended there."""
    return replace(
        completion,
        token_ids=completion.token_ids[:end],
        logprobs=completion.logprobs[:end],
        versions=completion.versions[:end],
        finish_reason="stop",
        routed_experts=None
        if completion.routed_experts is None
        else completion.routed_experts[: len(completion.routed_experts) - len(completion.token_ids) + end],
    )
