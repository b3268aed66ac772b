"""A generator that makes up tokens at once: what is left is the cost of everything around it."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from pathlib import Path

import numpy as np

from rollout.types import Completion, GenerateRequest, Health, WeightBucket


class MockGenerator:
    """Random tokens, lengths uniform in [max(1, min_new_tokens), max_new_tokens]; both functions of the seed."""

    def __init__(self, model_path: str) -> None:
        """Of the model folder only the vocabulary size of config.json is read."""
        self._vocab_size: int = json.loads((Path(model_path) / "config.json").read_text())["vocab_size"]
        self._version = 0
        self._done: deque[tuple[str, Completion]] = deque()
        self._something_done = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Completion:
        sampling = request.sampling
        rng = np.random.default_rng(request.seed)
        shortest = max(1, sampling.min_new_tokens)
        n = int(rng.integers(shortest, max(shortest, sampling.max_new_tokens) + 1))
        tokens = rng.integers(0, self._vocab_size, n, dtype=np.int32)
        return Completion(
            token_ids=tokens,
            logprobs=np.full(n, -np.log(self._vocab_size), np.float32),
            versions=np.full(n, self._version, np.int32),
            finish_reason="length" if n == sampling.max_new_tokens else "stop",
        )

    def submit(self, requests: list[GenerateRequest]) -> None:
        """Take many requests at once; `drain` hands out their completions."""
        asyncio.get_running_loop().create_task(self._run(requests))

    async def _run(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            self._done.append((request.request_id, await self.generate(request)))
        self._something_done.set()

    async def drain(self) -> list[tuple[str, Completion]]:
        """What finished since the last call; waits if nothing did."""
        await self._something_done.wait()
        self._something_done.clear()
        done = list(self._done)
        self._done.clear()
        return done

    async def pause(self) -> None:
        """Nothing ever runs between two calls."""

    async def update_weights(self, bucket: WeightBucket) -> None:
        """There are no weights."""

    async def resume(self, version: int) -> None:
        self._version = version

    async def health(self) -> Health:
        return Health(version=self._version, num_running=0, num_waiting=len(self._done))

    async def close(self) -> None:
        """Nothing to end."""
