"""What the calls of one episode have brought so far: between a workflow and the generators, recorded in the store.

A workflow that is run again after a restart makes the same calls again: finished ones are answered from the journal,
those in flight continue with their tokens. A call is named by its episode, its kind (a request by its seed, another one
by its name) and its turn: how many calls of that kind the episode has made before. What it asks for is compared, too:
where a workflow asks for something else than before, it gets a new answer.
Invariant: what one event holds is used once.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np

from rollout.experience import Event, Experience
from rollout.experience.episode import sampled_lengths
from rollout.time_limit import not_counted
from rollout.types import Completion, GenerateRequest, Sampler

logger = logging.getLogger(__name__)

T = TypeVar("T")

_current: ContextVar[JournaledSampler | None] = ContextVar("journal", default=None)
_call: ContextVar[str | None] = ContextVar("call", default=None)


class JournaledSampler:
    """The generators as the workflow of one episode sees them.

    `completions` are its finished ones. `load` is what the episode takes of the generators, in requests: those that
    run, and until end() those of `num_expected` that have not been answered. `on_change` is called with every
    difference."""

    def __init__(
        self,
        sampler: Sampler,
        experience: Experience,
        id: str,
        *,
        num_expected: int = 0,
        on_change: Callable[[int], None] = lambda difference: None,
    ) -> None:
        """`id`: of an episode in flight; what its journal holds is replayed."""
        self._sampler, self._experience, self._id = sampler, experience, id
        self._known = {event.key: event for event in experience.events(id)}
        self.num_lost = sum(sampled_lengths(self._known.values()))
        """Tokens that were sampled before a restart, and that the workflow has not asked for since."""
        self.num_replayed = 0
        """Tokens that were sampled before a restart, and are used."""
        self._turns: Counter[str] = Counter()
        self._num_expected = num_expected
        self._on_change = on_change
        self._num_finished = 0
        self._running: dict[str, tuple[str, str]] = {}  # by request id: key of the event, and what was asked
        self._ended = False
        self.completions: list[Completion] = []
        self.load = num_expected

    def enter(self) -> None:
        """Let recorded() in this task, and in those that it starts, use this journal."""
        _current.set(self)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return what the journal has, or sample it or the rest of it."""
        key, asked = self._key(f"seed {request.seed}"), _checksum(request)
        known = self._take_known(key, asked)
        if known is not None and request.output is None:
            assert isinstance(known.value, Completion), "recorded under the key of a request"
            self.num_replayed += len(known.value.token_ids)
            self.num_lost -= len(known.value.token_ids)
            if known.value.finish_reason != "abort":
                self._finish(known.value)
                self._count()
                return known.value
            request = replace(request, output=known.value)
        self._running[request.request_id] = key, asked
        try:
            self._count()
            with not_counted():
                completion = await self._sampler.generate(request)
            self._finish(completion)
            self.record(asked, {key: completion})
        finally:
            del self._running[request.request_id]
            self._count()
        return completion

    async def once(self, name: str, asked: str, call: Callable[[], Awaitable[T]]) -> T:
        """See recorded()."""
        key = self._key(f"call {name}")
        known = self._take_known(key, asked)
        if known is not None:
            return cast(T, known.value)  # of an earlier attempt at the same call
        before = _call.set(f"{self._id}: {key}, {hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()}")
        try:
            result = await call()
        finally:
            _call.reset(before)
        self.record(asked, {key: result})
        return result

    def place_of(self, name: str) -> str:
        """Return what the keys for known() and record() begin with. `name`: of a thing with a state, within the
        episode; things of one name are counted."""
        return self._key(f"state {name}")

    def known(self, key: str, asked: str) -> object:
        """Return what an earlier attempt has recorded last under this key, or None."""
        found = self._take_known(key, asked)
        return None if found is None else found.value

    def record(self, asked: str, values: Mapping[str, object]) -> None:
        """Record plain values by their keys, all or none of them, in place of those before."""
        if not self._ended:
            self._experience.journal(
                self._id, *(Event(key=key, asked=asked, value=value) for key, value in values.items())
            )

    def record_partial(self, partial: Mapping[str, Completion]) -> None:
        """Record the tokens so far that the generators report for requests in flight, by request id."""
        for request_id, (key, asked) in self._running.items():
            part = partial.get(request_id)
            if part is not None and len(part.token_ids):
                self.record(asked, {key: part})

    def end(self) -> None:
        """Count the workflow as ended: the load is now what may still run of it, and nothing more is recorded."""
        self._num_expected, self._ended = 0, True
        self._count()

    def _finish(self, completion: Completion) -> None:
        self._num_finished += 1
        self.completions.append(completion)

    def _key(self, kind: str) -> str:
        turn = self._turns[kind]
        self._turns[kind] += 1
        return f"{kind}, turn {turn}"

    def _take_known(self, key: str, asked: str) -> Event | None:
        known = self._known.pop(key, None)
        if known is None or known.asked == asked:
            return known
        logger.debug("episode %s, %s: asks for something else than before the restart", self._id, key)
        return None

    def _count(self) -> None:
        before = self.load
        self.load = max(self._num_expected - self._num_finished, len(self._running))
        if self.load != before:
            self._on_change(self.load - before)


async def recorded(name: str, call: Callable[[], Awaitable[T]], *, asked: object = None) -> T:
    """Await `call()` in a workflow, once in its episode: after a restart, return the result of before, as for a tool
    that has effects or is slow. `name`: of the tool and the sample; calls of one name are counted.
    `asked`: what the call depends on; where its repr() is another one, the call is made again. The result consists of
    plain values (numbers, text, lists, dicts, numpy arrays).

    A call that a kill interrupts, or whose result no recover checkpoint has, is made again, with the same call_id()."""
    journal = _current.get()
    return await call() if journal is None else await journal.once(name, repr(asked), call)


def current_journal() -> JournaledSampler | None:
    """Return the journal of the episode that this is called in; an evaluation has none."""
    return _current.get()


def call_id() -> str:
    """Return what identifies the call of recorded() that this is called in, also after restarts: the idempotency key
    for a tool with effects. In an evaluation each call has a new one."""
    return _call.get() or uuid.uuid4().hex


def _checksum(request: GenerateRequest) -> str:
    prompt = np.asarray(request.prompt_ids, np.int64).tobytes()
    return hashlib.blake2b(prompt + repr(request.sampling).encode(), digest_size=16).hexdigest()
