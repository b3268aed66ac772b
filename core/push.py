"""Weight push: version n + 1 from the trainer's shards to every generator, while they go on sampling.

A transport moves buckets of full tensors under Hugging Face names; what a generator does with its running requests
when they arrive is its own `interrupt` setting. `LocalPush` goes through the object store, for trainers and generators
without a GPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from core.launch import GeneratorPool, TrainerGroup


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """What one push cost."""

    seconds: float
    longest_pause_seconds: float
    """The longest time that one generator did not sample."""


class WeightPush(Protocol):
    """How weights travel."""

    def push(self, version: int) -> PushReport:
        """Return when every generator samples with the trainer's current weights, under this version."""
        ...


class LocalPush:
    """Through the object store: gathered on the trainer's first rank, fetched by every generator before it pauses."""

    def __init__(self, trainer: TrainerGroup, generators: GeneratorPool, *, bucket_bytes: int, timeout_seconds: float):
        self._trainer = trainer
        self._generators = generators
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout_seconds

    def push(self, version: int) -> PushReport:
        start = time.perf_counter()
        buckets = self._trainer.export_weights("actor", self._bucket_bytes)
        pauses = self._generators.receive(buckets, version, self._timeout)
        return PushReport(seconds=time.perf_counter() - start, longest_pause_seconds=max(pauses))
