"""Continuous batching, one step at a time: run one token of every slot, admit waiting requests, hand out what is done.

Invariant: between two steps every running request has exactly one token that is not in the cache yet (the last one
sampled), so it can end, or have its keys and values computed anew, between any two tokens.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_specs.config import ModelConfig
from rollout.inference.backend import Interrupt
from rollout.inference.embedded.kv_cache import KVCache, capacity_for
from rollout.inference.embedded.model import Transformer
from rollout.inference.embedded.sampler import sample
from rollout.inference.embedded.slots import Job, Slots
from rollout.inference.embedded.weights import ModelWeights
from rollout.types import Completion, GenerateRequest

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

    @property
    def cache_bytes(self) -> int:
        """Memory of the keys and values held now."""
        return self._cache.num_bytes

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
