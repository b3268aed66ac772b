"""The mock generator as a backend: random tokens, no weights; for tests and measurements."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from model_specs.untrusted import positive, read_json_object
from rollout.inference.backend import ALL_INTERRUPTS, Backend, BackendSettings, Capabilities, Replica
from rollout.types import Completion, FinishReason, GenerateRequest, Health

if TYPE_CHECKING:  # a --dry-run reads this file, and needs no numpy
    import numpy as np

    from rollout.bucket import FlatBucket


class MockBackend(Backend):
    """Makes up tokens for any model: each has a vocabulary."""

    label = "mock generator"
    capabilities = Capabilities(
        devices=("cpu",), transports=("local",), staged_transports=("local",), staged_interrupts=ALL_INTERRUPTS,
        holds_weights=False,
    )  # fmt: skip

    async def start(self, settings: BackendSettings) -> Replica:
        return MockGenerator(settings.model_path, seconds_per_token=settings.config.mock_seconds_per_token)


@dataclass(eq=False)
class _Sampling:
    """A request on its way: what it will be, and the versions of the tokens that it has."""

    request: GenerateRequest
    token_ids: np.ndarray  # [n] int32
    versions: list[int]


class MockGenerator:
    """Random tokens, lengths uniform in [max(1, min_new_tokens), max_new_tokens]; both functions of the seed alone, so
    token i of a completion is the same however often it was interrupted.

    Tokens come at once, or one every `seconds_per_token`; pause() stops them, and requests continue after resume().
    """

    def __init__(self, model_path: str, *, seconds_per_token: float = 0.0) -> None:
        """Read the vocabulary size from config.json in `model_path`; nothing else of the folder is used."""
        self._vocab_size = positive(read_json_object(Path(model_path) / "config.json"), "vocab_size")
        self._seconds_per_token = seconds_per_token
        self._version = 0
        self._running: dict[str, _Sampling] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._done: deque[tuple[str, Completion]] = deque()
        self._something_done = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()

    async def generate(self, request: GenerateRequest) -> Completion:
        import numpy as np

        limits, given = request.sampling, request.output
        rng = np.random.default_rng(request.seed)
        shortest = max(1, limits.min_new_tokens)
        n = int(rng.integers(shortest, max(shortest, limits.max_new_tokens) + 1))
        sampling = _Sampling(
            request,
            token_ids=rng.integers(0, self._vocab_size, n, dtype=np.int32),
            versions=[] if given is None else given.versions.tolist(),
        )
        if self._seconds_per_token:
            await self._take_time(sampling)
        else:
            sampling.versions += [self._version] * (n - len(sampling.versions))
        return self._completion(sampling, "length" if n == limits.max_new_tokens else "stop")

    async def _take_time(self, sampling: _Sampling) -> None:
        self._running[sampling.request.request_id] = sampling
        try:
            while len(sampling.versions) < len(sampling.token_ids):
                await asyncio.sleep(self._seconds_per_token)
                await self._open.wait()
                sampling.versions.append(self._version)
        finally:
            del self._running[sampling.request.request_id]

    def _completion(self, sampling: _Sampling, reason: FinishReason) -> Completion:
        import numpy as np

        n = len(sampling.versions)
        return Completion(
            token_ids=sampling.token_ids[:n],
            logprobs=np.full(n, -np.log(self._vocab_size), np.float32),
            versions=np.array(sampling.versions, np.int32),
            finish_reason=reason,
        )

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Take many requests at once; `drain` hands out their completions."""
        together = [[r] for r in requests] if self._seconds_per_token else [list(requests)]
        for some in together:
            task = asyncio.get_running_loop().create_task(self._run(some), name=some[0].request_id)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests from submit() without a completion. Unknown ids are passed over."""
        for task in self._tasks:
            if task.get_name() in request_ids:
                task.cancel()

    async def _run(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            self._done.append((request.request_id, await self.generate(request)))
        self._something_done.set()

    async def drain(self) -> list[tuple[str, Completion]]:
        """Return what has finished since the last call; wait if nothing has."""
        await self._something_done.wait()
        self._something_done.clear()
        done = list(self._done)
        self._done.clear()
        return done

    async def pause(self) -> None:
        """Stop sampling until resume()."""
        self._open.clear()

    async def update_weights(self, bucket: FlatBucket) -> None:
        """Ignore the weights."""

    async def resume(self, version: int) -> None:
        self._version = version
        self._open.set()

    async def health(self) -> Health:
        return Health(version=self._version, num_running=len(self._running), num_waiting=len(self._done))

    async def partial(self) -> dict[str, Completion]:
        """Return the tokens so far of requests in flight, and completions that drain() has not returned yet."""
        return {name: self._completion(s, "abort") for name, s in self._running.items()} | dict(self._done)

    async def close(self) -> None:
        """End running requests without a completion."""
        for task in self._tasks:
            task.cancel()
