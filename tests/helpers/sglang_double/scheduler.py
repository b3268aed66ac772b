"""The double's scheduler: one token for every running request in each step, unless it is paused.

Token i of a sequence (prompt included) is a function of i and of the weights' version: whoever reads an answer can see
by the tokens alone which version sampled each of them.
"""

import asyncio
import base64
from array import array
from dataclasses import dataclass, field
from typing import Any

from helpers.sglang_double.model import VOCAB

TOKENS_PER_VERSION = 50
RULED_OUT = -1e8
"""A token with a lower logit bias cannot be sampled."""


def token_at(position: int, version: int) -> int:
    return version * TOKENS_PER_VERSION % VOCAB + position % TOKENS_PER_VERSION


def logprob_of(token: int) -> float:
    """Exact in float32, and another one for every token."""
    return -(token + 1) / 256


@dataclass(eq=False)
class Request:
    """A request that has reached the scheduler."""

    rid: str
    prompt: list[int]
    sampling: dict[str, Any]
    answer: asyncio.Future[dict[str, Any]]
    """finish_reason, as it goes into meta_info."""
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    was_dropped: bool = False
    """Aborted in the queue: the server forgets its tokens."""

    def sample(self, version: int) -> None:
        bias = self.sampling.get("logit_bias") or {}
        token = token_at(len(self.prompt) + len(self.tokens), version)
        while bias.get(str(token), 0.0) < RULED_OUT:
            token = (token + 1) % VOCAB
        self.tokens.append(token)
        self.versions.append(version)
        if len(self.tokens) >= self.sampling["max_new_tokens"]:
            self.end({"type": "length", "length": len(self.tokens)})
        elif token in (self.sampling.get("stop_token_ids") or ()) and not self.sampling.get("ignore_eos"):
            self.end({"type": "stop", "matched": token})

    def end(self, reason: dict[str, Any]) -> None:
        if not self.answer.done():
            self.answer.set_result(reason)


class Scheduler:
    """Lives in the event loop of the server."""

    def __init__(self) -> None:
        self.version, self.paused = 0, False
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.idle = asyncio.Event()
        self.idle.set()

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.idle.clear()

    def step(self) -> None:
        """A forward pass over all requests, the waiting ones first admitted."""
        if self.paused:
            return
        self.running, self.waiting = self.running + self.waiting, []
        for request in self.running:
            request.sample(self.version)
        self._drop_ended()

    def pause(self, mode: str) -> None:
        """Mode retract sends running requests back to the queue."""
        self.paused = True
        if mode == "retract":
            self.waiting, self.running = self.running + self.waiting, []

    def go_on(self, version: int) -> None:
        self.version, self.paused = version, False

    def abort_all(self) -> None:
        """Running requests end with what they have; those in the queue lose it."""
        for request in self.waiting:
            request.was_dropped = True
            request.end({"type": "abort", "message": "Abort in the queue"})
        for request in self.running:
            request.end({"type": "abort", "message": "Aborted", "status_code": None, "err_type": None})
        self._drop_ended()

    def abort(self, request: Request) -> None:
        """Of a client that has left."""
        request.answer.cancel()
        self._drop_ended()

    def in_flight(self) -> dict[str, Any]:
        """What all requests have sampled, as bytes end to end."""
        requests = [*self.running, *self.waiting]
        columns = {
            "token_ids": array("i", [token for r in requests for token in r.tokens]),
            "logprobs": array("f", [logprob_of(token) for r in requests for token in r.tokens]),
            "versions": array("i", [version for r in requests for version in r.versions]),
        }
        coded = {name: base64.b64encode(numbers.tobytes()).decode() for name, numbers in columns.items()}
        return {"names": [r.rid for r in requests], "lengths": [len(r.tokens) for r in requests], **coded}

    def _drop_ended(self) -> None:
        self.running = [request for request in self.running if not request.answer.done()]
        self.waiting = [request for request in self.waiting if not request.answer.done()]
        if not self.running and not self.waiting:
            self.idle.set()
