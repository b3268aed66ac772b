"""The state of the running requests as arrays over slots, so that a step runs no Python per request.

Invariant: entries [:num_output] of a slot's row in `tokens`, `logprobs` and `versions` refer to the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollout.inference.embedded.sampler import uniforms
from rollout.types import Completion, FinishReason, GenerateRequest

_UNIFORMS_AHEAD = 32
_NO_TOKEN = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A request and what is sampled of it so far."""

    request: GenerateRequest
    prefix: np.ndarray  # [p] int32: prompt and output so far
    output: Completion | None
    key: bytes
    """Equal for jobs whose prefixes are equal."""

    @classmethod
    def of(cls, request: GenerateRequest, output: Completion | None) -> Job:
        prompt = np.asarray(request.prompt_ids, dtype=np.int32)
        prefix = prompt if output is None else np.concatenate((prompt, output.token_ids), dtype=np.int32)
        return cls(request=request, prefix=prefix, output=output, key=prefix.tobytes())

    def partial(self) -> Completion:
        """Return the completion that an abort returns while the job waits."""
        if self.output is not None:
            return replace(self.output, finish_reason="abort")
        empty = np.empty(0, dtype=np.int32)
        return Completion(token_ids=empty, logprobs=empty.astype(np.float32), versions=empty, finish_reason="abort")


class Slots:
    """One row a slot; `free` holds the slots without a request. top_k is in [1, vocab_size], the latter meaning off."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.free = deque(range(num_slots))
        self.requests: list[GenerateRequest | None] = [None] * num_slots
        self._vocab_size = vocab_size
        self.position = np.zeros(num_slots, dtype=np.int64)  # of the next token to run: entries in the cache
        self.num_output = np.zeros(num_slots, dtype=np.int64)
        self.last_token = np.zeros(num_slots, dtype=np.int64)
        self.max_new_tokens = np.zeros(num_slots, dtype=np.int64)
        self.min_new_tokens = np.zeros(num_slots, dtype=np.int64)
        self.temperature = np.zeros(num_slots, dtype=np.float32)
        self.top_p = np.zeros(num_slots, dtype=np.float32)
        self.top_k = np.zeros(num_slots, dtype=np.int64)
        self.stop_ids = np.full((num_slots, 1), _NO_TOKEN, dtype=np.int64)
        self._pause_ids = self.stop_ids.copy()
        self._seeds = np.zeros(num_slots, dtype=np.uint64)
        self._uniforms = np.zeros((num_slots, _UNIFORMS_AHEAD))
        self._uniforms_from = np.zeros(num_slots, dtype=np.int64)
        self.tokens = np.zeros((num_slots, 0), dtype=np.int32)
        self.logprobs = np.zeros((num_slots, 0), dtype=np.float32)
        self.versions = np.zeros((num_slots, 0), dtype=np.int32)

    @property
    def num_running(self) -> int:
        return len(self.requests) - len(self.free)

    def running(self) -> Iterator[tuple[int, GenerateRequest]]:
        """Yield (slot, request) of every running request."""
        return ((slot, request) for slot, request in enumerate(self.requests) if request is not None)

    def start(self, jobs: Sequence[Job]) -> np.ndarray:
        """Give each job a free slot: [n] int64."""
        slots = np.array([self.free.popleft() for _ in jobs], dtype=np.int64)
        for slot, job in zip(slots.tolist(), jobs, strict=True):
            self._start_one(slot, job)
        self._draw_ahead(slots)
        return slots

    def _start_one(self, slot: int, job: Job) -> None:
        sampling = job.request.sampling
        self.requests[slot] = job.request
        self.position[slot] = len(job.prefix)
        self.max_new_tokens[slot] = sampling.max_new_tokens
        self.min_new_tokens[slot] = sampling.min_new_tokens
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = min(sampling.top_k, self._vocab_size) if sampling.top_k > 0 else self._vocab_size
        self.stop_ids = _with_row(self.stop_ids, slot, sampling.stop_token_ids)
        self._pause_ids = _with_row(self._pause_ids, slot, sampling.pause_token_ids)
        self._seeds[slot] = job.request.seed % 2**64
        self.num_output[slot] = 0
        if job.output is not None:
            n = len(job.output.token_ids)
            self._widen(n)
            self.num_output[slot] = n
            self.tokens[slot, :n] = job.output.token_ids
            self.logprobs[slot, :n] = job.output.logprobs
            self.versions[slot, :n] = job.output.versions

    def _widen(self, width: int) -> None:
        """Make room for `width` output tokens per slot."""
        if width > self.tokens.shape[1]:
            more = ((0, 0), (0, max(64, width, 2 * self.tokens.shape[1]) - self.tokens.shape[1]))
            self.tokens = np.pad(self.tokens, more)
            self.logprobs = np.pad(self.logprobs, more)
            self.versions = np.pad(self.versions, more)

    def _draw_ahead(self, slots: np.ndarray) -> None:
        self._uniforms_from[slots] = self.num_output[slots]
        self._uniforms[slots] = uniforms(self._seeds[slots], self.num_output[slots], _UNIFORMS_AHEAD)

    def uniforms(self, slots: np.ndarray) -> np.ndarray:
        """Return the number that draws each slot's next token: [n] float64, a function of the request's seed and the
        token's place in the completion."""
        offset = self.num_output[slots] - self._uniforms_from[slots]
        if offset.max() >= _UNIFORMS_AHEAD:
            self._draw_ahead(slots)
            offset[:] = 0
        return self._uniforms[slots, offset]

    def forbidden(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return (rows among `slots`, token ids) of the stop tokens that min_new_tokens still excludes, or None."""
        early = (self.num_output[slots] < self.min_new_tokens[slots]).nonzero()[0]
        if not len(early):
            return None
        ids = self.stop_ids[slots[early]]
        which, column = ((ids >= 0) & (ids < self._vocab_size)).nonzero()
        return early[which], ids[which, column]

    def append(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> np.ndarray:
        """Record one token for each slot; returns those that are now complete."""
        n = self.num_output[slots]
        self._widen(int(n.max()) + 1)
        self.tokens[slots, n] = tokens
        self.logprobs[slots, n] = logprobs
        self.versions[slots, n] = version
        self.last_token[slots] = tokens
        self.num_output[slots] = n + 1
        stopped = (tokens[:, None] == self.stop_ids[slots]).any(axis=1)
        paused = (tokens[:, None] == self._pause_ids[slots]).any(axis=1)
        return slots[stopped | paused | (n + 1 >= self.max_new_tokens[slots])]

    def reason(self, slot: int) -> FinishReason:
        """Return why append() returned this slot."""
        if (self.stop_ids[slot] == self.last_token[slot]).any():
            return "stop"
        return "length" if self.num_output[slot] >= self.max_new_tokens[slot] else "abort"

    def finish(self, slot: int, reason: FinishReason) -> tuple[GenerateRequest, Completion]:
        """Free the slot and hand out what it holds."""
        finished = self.peek(slot, reason)
        self.requests[slot] = None
        self.free.append(slot)
        return finished

    def peek(self, slot: int, reason: FinishReason) -> tuple[GenerateRequest, Completion]:
        """Return the request of a running slot and its tokens so far."""
        request, n = self.requests[slot], int(self.num_output[slot])
        assert request is not None, "only running slots finish"
        return request, Completion(
            token_ids=self.tokens[slot, :n].copy(),
            logprobs=self.logprobs[slot, :n].copy(),
            versions=self.versions[slot, :n].copy(),
            finish_reason=reason,
        )


def _with_row(ids: np.ndarray, slot: int, tokens: Sequence[int]) -> np.ndarray:
    """Return `ids` ([slots, n] int64), wide enough, with `tokens` in one row."""
    if len(tokens) > ids.shape[1]:
        ids = np.pad(ids, ((0, 0), (0, len(tokens) - ids.shape[1])), constant_values=_NO_TOKEN)
    ids[slot] = _NO_TOKEN
    ids[slot, : len(tokens)] = tokens
    return ids
