"""What one prompt's requests have sampled so far: between a workflow and the generators, for recover checkpoints.

A workflow that is run again after a restart sends the same requests again: finished ones are answered from the ledger,
those in flight continue with their tokens. A request is recognised by its prompt, sampling parameters and seed.
Invariant: what one saved entry holds is used once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.types import Completion, GenerateRequest, Generator, Health

if TYPE_CHECKING:
    from rollout.bucket import FlatBucket

Entry = tuple[bytes, Completion]
"""Key of a request, and what it has."""


class PromptLedger(Generator):
    """The generators as one prompt's workflow sees them. `known`: the prompt's entries of a checkpoint.

    `load` is what the prompt takes of the generators, in requests: those that run, and until end() those of
    `num_expected` that have not been answered. `on_change` is called with every difference."""

    def __init__(
        self,
        generator: Generator,
        known: Sequence[Entry] = (),
        *,
        num_expected: int = 0,
        on_change: Callable[[int], None] = lambda difference: None,
    ) -> None:
        self._generator = generator
        self._known = list(known)
        self._num_expected = num_expected
        self._on_change = on_change
        self._finished: list[Entry] = []
        self._running: dict[str, tuple[bytes, Completion | None]] = {}  # by request id: key, and what it came with
        self.load = num_expected

    async def generate(self, request: GenerateRequest) -> Completion:
        key = request_key(request)
        known = self._take_known(key) if request.output is None else None
        if known is not None and known.finish_reason != "abort":
            self._finished.append((key, known))
            self._count()
            return known
        if known is not None:
            request = replace(request, output=known)
        self._running[request.request_id] = key, request.output
        try:
            self._count()
            completion = await self._generator.generate(request)
            self._finished.append((key, completion))
        finally:
            del self._running[request.request_id]
            self._count()
        return completion

    def end(self) -> None:
        """Record the end of the workflow: the prompt's load is now what may still run of it."""
        self._num_expected = 0
        self._count()

    def _count(self) -> None:
        before = self.load
        self.load = max(self._num_expected - len(self._finished), len(self._running))
        if self.load != before:
            self._on_change(self.load - before)

    def entries(self, partial: Mapping[str, Completion]) -> list[Entry]:
        """Return all entries, given the tokens so far that the generators report for requests in flight."""
        running = [(key, partial.get(name, given)) for name, (key, given) in self._running.items()]
        with_tokens = [(key, part) for key, part in running if part is not None and len(part.token_ids)]
        return [*self._finished, *with_tokens, *self._known]

    def _take_known(self, key: bytes) -> Completion | None:
        for i, (other, completion) in enumerate(self._known):
            if other == key:
                del self._known[i]
                return completion
        return None

    async def pause(self) -> None:
        await self._generator.pause()

    async def update_weights(self, bucket: FlatBucket) -> None:
        await self._generator.update_weights(bucket)

    async def resume(self, version: int) -> None:
        await self._generator.resume(version)

    async def health(self) -> Health:
        return await self._generator.health()

    async def partial(self) -> Mapping[str, Completion]:
        return await self._generator.partial()

    async def close(self) -> None:
        """Leave the generators open: other prompts share them."""


def request_key(request: GenerateRequest) -> bytes:
    """Return a key that is equal for requests that would sample the same tokens."""
    prompt = np.asarray(request.prompt_ids, np.int64).tobytes()
    rest = repr((request.seed, request.sampling)).encode()
    return hashlib.blake2b(prompt + rest, digest_size=16).digest()


def to_plain(entry: Entry) -> dict[str, Any]:
    """Convert an entry to plain types and numpy arrays."""
    key, part = entry
    return {
        "key": key,
        "token_ids": part.token_ids,
        "logprobs": part.logprobs,
        "versions": part.versions,
        "finish_reason": part.finish_reason,
        "routed_experts": part.routed_experts,
    }


def from_plain(plain: Mapping[str, Any]) -> Entry:
    """Return the inverse of `to_plain`."""
    return plain["key"], Completion(**{name: value for name, value in plain.items() if name != "key"})
