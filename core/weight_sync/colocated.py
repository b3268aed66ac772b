"""Trainer and generators on the same GPUs: they take turns, and each leaves its memory to the other.

A turn of the trainer begins with offload_generators(): the servers stop, hand back what they were answering, and
release weights and cache. It ends with push(): the trainer moves its optimizer state, critic and reference to the host
and drops its gradients, and the servers take their memory back and load the trainer's weights.
Invariants: the servers' weights are released and taken back once a turn; between the two nothing samples. A server
takes memory only after the trainer has left it, and buckets are laid out in what both leave free.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

from core.weight_sync.base import PushReport
from core.weight_sync.servers import PUSHED, GeneratorSide, ServerPush, push_report

logger = logging.getLogger(__name__)

_WEIGHTS, _CACHE = ["weights"], ["kv_cache"]


class ReleasingGenerators(GeneratorSide, Protocol):
    """Generators that can leave the device."""

    def release_memory(self, tags: list[str], timeout_seconds: float) -> None: ...

    def resume_memory(self, tags: list[str], timeout_seconds: float) -> None: ...


class ColocatedPush(ServerPush[ReleasingGenerators]):
    """`WeightPush` for shared devices. It begins with the servers running and the trainer's engines not yet made:
    call offload_generators() before they are."""

    def offload_generators(self) -> None:
        start = time.perf_counter()
        self._generators.pause(self._timeout)
        self._generators.release_memory(_CACHE + _WEIGHTS, self._timeout)
        released = time.perf_counter()
        self._trainer.reload()
        logger.info(
            "Servers released their memory in %.3f s, the trainer reloaded its state in %.3f s",
            released - start, time.perf_counter() - released,
        )  # fmt: skip

    def push(self, version: int) -> PushReport:
        """Push the weights of `version`. Raises PushError, GeneratorCallError or GeneratorGone; generation stays paused
        then; the run must end."""
        start = time.perf_counter()
        self._trainer.offload(PUSHED)
        offloaded = time.perf_counter()
        self._generators.resume_memory(_WEIGHTS, self._timeout)
        resumed = time.perf_counter()
        self._prepare()
        gather_seconds = time.perf_counter() - resumed
        sent = self._send()
        cache = time.perf_counter()
        self._trainer.offload(PUSHED)  # now what the buckets took
        self._generators.resume_memory(_CACHE, self._timeout)
        pauses = self._generators.resume(version, self._timeout)
        self._num_pushes += 1
        logger.info(
            "The trainer offloaded its state in %.3f s, servers resumed weights in %.3f s, cache and generation in "
            "%.3f s",
            offloaded - start, resumed - offloaded, time.perf_counter() - cache,
        )  # fmt: skip
        return push_report(version, sent, pauses, start=start, gather_seconds=gather_seconds)
