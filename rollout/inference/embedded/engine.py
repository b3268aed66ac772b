"""Continuous batching, one step at a time: run one token of every slot, admit waiting requests, hand out what is done.

Invariant: between two steps every running request has exactly one token that is not in the cache yet (the last one
sampled), so it can end, or have its keys and values computed anew, between any two tokens.

The state of the running requests is in arrays over slots, so that a step runs no Python per request. Invariant: entries
[:num_output] of a slot's row in `tokens`, `logprobs` and `versions` refer to the same tokens.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from model_specs.config import ModelConfig
from rollout.inference.backend import Interrupt
from rollout.inference.embedded.model import KVCache, Transformer, capacity_for, sample, uniforms
from rollout.inference.embedded.weights import ModelWeights
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
    def of(cls, request: GenerateRequest, output: Completion | None) -> Self:
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


Finished = list[tuple[GenerateRequest, Completion]]

PREFILL_TOKENS = 2048
"""Padded prompt tokens that one step admits at most (one prompt always fits): bounds the memory of a prompt pass and
the time for which running requests, and pause(), wait for it."""

TRIM_STEPS = 512
"""Steps between two releases of cache memory that was not needed lately."""

LARGE_BYTES, LARGE_TRIM_STEPS = 2**30, 64
"""A cache of more than this is looked after so often: requests that grow leave memory at every length they passed, in
512 steps five times what they need."""


def padded_length(length: int) -> int:
    """Return the length to which a prompt is padded. It depends on the prompt alone, because the length of a batch
    changes the rounding of attention."""
    step = max(8, capacity_for(length) // 16)
    return -(-length // step) * step


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """A prefix that was run, kept while requests that begin with it wait for a slot."""

    kv: Tensor  # [layers, 2, G, capacity, D]
    hidden: Tensor  # [hidden_size], of its last token


class Engine:
    """Not thread-safe. Every method requires torch.inference_mode()."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, *, max_running: int) -> None:
        self._weights = weights
        self._model = Transformer(config, weights)
        self._slots = Slots(max_running, config.vocab_size)
        self._vocab_size = config.vocab_size
        self._cache = KVCache(config, max_slots=max_running, dtype=weights.embedding.dtype)
        self._waiting: deque[Job] = deque()
        self._num_waiting_for: Counter[bytes] = Counter()
        self._prompts: dict[bytes, _Prompt] = {}
        self._num_steps = 0
        self.version = 0

    @property
    def num_running(self) -> int:
        return self._slots.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, requests: Iterable[GenerateRequest]) -> None:
        """Queue requests; they are admitted in this order."""
        for request in requests:
            job = Job.of(request, request.output)
            self._waiting.append(job)
            self._num_waiting_for[job.key] += 1

    def step(self) -> Finished:
        """Sample one token for every running request, the newly admitted included; returns what is complete."""
        running = self._cache.order()
        parts = [(running, self._decode(running))] if len(running) else []
        parts += self._admit()
        if not parts:
            return []
        slots = np.concatenate([part[0] for part in parts])
        done = self._sample(slots, torch.cat([part[1] for part in parts]))
        finished = [self._slots.finish(s, self._slots.reason(s)) for s in done.tolist()]
        full = slots[self._slots.position[slots] >= self._cache.capacity_of[slots]]
        if len(done):
            full = np.setdiff1d(full, done, assume_unique=True)
        if len(done) or len(full):
            self._cache.rearrange(done, full)
        self._num_steps += 1
        if self._num_steps % (LARGE_TRIM_STEPS if self._cache.num_bytes > LARGE_BYTES else TRIM_STEPS) == 0:
            self._cache.trim()
        return finished

    def abort(self, request_ids: Collection[str]) -> Finished:
        """End these requests with what they have, running or waiting. Unknown ids are passed over."""
        aborted = self._release([s for s, r in self._slots.running() if r.request_id in request_ids])
        waiting = [job for job in self._waiting if job.request.request_id in request_ids]
        self._waiting = deque(job for job in self._waiting if job.request.request_id not in request_ids)
        for job in waiting:
            self._no_longer_waiting(job.key)
        return aborted + [(job.request, job.partial()) for job in waiting]

    def partial(self) -> dict[str, Completion]:
        """Return the tokens so far of running and waiting requests, by request id."""
        running = [self._slots.peek(slot, "abort") for slot, _ in self._slots.running()]
        waiting = [(job.request, job.output) for job in self._waiting if job.output is not None]
        return {request.request_id: completion for request, completion in [*running, *waiting]}

    def interrupt(self, how: Interrupt) -> Finished:
        """Make way for new weights. "abort" ends the running requests and returns them; "retract" puts them back to
        the head of the queue, to be run again from their tokens; "in_place" leaves them as they are."""
        if how == "in_place":
            return []
        released = self._release([slot for slot, _ in self._slots.running()])
        if how == "abort":
            return released
        jobs = [Job.of(request, output) for request, output in released]
        self._waiting.extendleft(reversed(jobs))
        self._num_waiting_for.update(job.key for job in jobs)
        return []

    def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors under their Hugging Face names into the model. Raises ValueError as ModelWeights.update."""
        self._weights.update(tensors)
        self._prompts.clear()

    def _release(self, slots: list[int]) -> Finished:
        if slots:
            self._cache.rearrange(np.array(slots), np.array([], dtype=np.int64))
        return [self._slots.finish(slot, "abort") for slot in slots]

    def _decode(self, slots: np.ndarray) -> Tensor:
        """Run the last sampled token of each slot: hidden states [n, hidden_size]."""
        positions = self._slots.position[slots]
        tokens = torch.from_numpy(self._slots.last_token[slots])
        hidden = self._model.decode(tokens, torch.from_numpy(positions), int(positions.max()) + 1, self._cache)
        self._slots.position[slots] = positions + 1
        return hidden

    def _sample(self, slots: np.ndarray, hidden: Tensor) -> np.ndarray:
        """Draw the next token of each slot and record it; returns the slots that are complete."""
        running = self._slots
        logits = self._model.logits(hidden)
        forbidden = running.forbidden(slots)
        if forbidden is not None:
            logits[torch.from_numpy(forbidden[0]), torch.from_numpy(forbidden[1])] = -torch.inf
        tokens, logprobs = sample(
            logits,
            running.temperature[slots],
            running.top_p[slots],
            running.top_k[slots],
            running.uniforms(slots),
            vocab_size=self._vocab_size,
        )
        return running.append(slots, tokens, logprobs, self.version)

    def _admit(self) -> list[tuple[np.ndarray, Tensor]]:
        """Move waiting requests to free slots: (slots [n], hidden states of their last tokens [n, hidden_size])."""
        batches: dict[tuple[int, int], list[Job]] = {}  # by padded length and capacity
        to_run: set[bytes] = set()
        num_tokens, free = 0, len(self._slots.free)
        while self._waiting and free:
            job = self._waiting[0]
            shape = padded_length(len(job.prefix)), capacity_for(len(job.prefix) + 1)
            if job.key not in self._prompts and job.key not in to_run:
                num_tokens += shape[0]
                if to_run and num_tokens > PREFILL_TOKENS:
                    break
                to_run.add(job.key)
            batches.setdefault(shape, []).append(self._waiting.popleft())
            free -= 1
        return [self._start(jobs, *shape) for shape, jobs in batches.items()]

    def _start(self, jobs: list[Job], length: int, capacity: int) -> tuple[np.ndarray, Tensor]:
        """Give jobs of one padded length their slots. Each distinct prefix is run once; the others copy it."""
        jobs.sort(key=lambda job: job.key in self._prompts)
        slots = self._slots.start(jobs)
        kv = self._cache.add(slots, capacity)
        fresh = [job for job in jobs if job.key not in self._prompts]
        hidden = [self._prefill(fresh, kv[:, :, : len(fresh), :, :length])] if fresh else []
        for i, job in enumerate(jobs[len(fresh) :], start=len(fresh)):
            kv[:, :, i] = self._prompts[job.key].kv
            hidden.append(self._prompts[job.key].hidden[None])
        for i, job in enumerate(jobs):
            self._no_longer_waiting(job.key)
            if self._num_waiting_for[job.key] and job.key not in self._prompts:
                self._prompts[job.key] = _Prompt(kv=kv[:, :, i].clone(), hidden=hidden[0][i].clone())
        return slots, torch.cat(hidden)

    def _prefill(self, jobs: Sequence[Job], kv: Tensor) -> Tensor:
        """Run the distinct prefixes of `jobs` in one padded batch and fill every job's part of `kv`
        ([layers, 2, n, G, padded length, D]). Returns the hidden states of the last tokens, [n, hidden_size]."""
        row_of = {key: row for row, key in enumerate(dict.fromkeys(job.key for job in jobs))}
        prefixes = {job.key: job.prefix for job in jobs}
        tokens = np.zeros((len(row_of), kv.shape[4]), dtype=np.int64)
        for row, prefix in zip(tokens, prefixes.values(), strict=True):
            row[: len(prefix)] = prefix
        lengths = np.array([len(prefix) for prefix in prefixes.values()])
        rows = torch.from_numpy(np.array([row_of[job.key] for job in jobs]))
        shared = len(row_of) < len(jobs)

        def store(layer: int, k: Tensor, v: Tensor) -> None:
            kv[layer, 0] = k[rows] if shared else k
            kv[layer, 1] = v[rows] if shared else v

        hidden = self._model.prefill(torch.from_numpy(tokens), torch.from_numpy(lengths), store)
        return hidden[rows]

    def _no_longer_waiting(self, key: bytes) -> None:
        self._num_waiting_for[key] -= 1
        if not self._num_waiting_for[key]:
            del self._num_waiting_for[key]
            self._prompts.pop(key, None)
