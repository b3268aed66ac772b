"""Weight push: version n + 1 from the trainer's shards to every generator, while they continue sampling.

A transport moves buckets of full tensors under Hugging Face names; what a generator does with its running requests
when they arrive is its own `interrupt` setting. `LocalPush` goes through the object store, for trainers and generators
without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """What one push cost."""

    seconds: float
    longest_pause_seconds: float
    """The longest time that one generator did not sample."""
    gather_seconds: float
    """Before the pause: gathering, converting and laying out what fits."""
    send_seconds: float
    num_bytes: int
    changed: float | None = None
    """Share of the values that have changed, where only those were sent."""

    def metrics(self) -> dict[str, float]:
        return {
            "push/seconds": self.seconds,
            "push/pause_seconds": self.longest_pause_seconds,
            "push/gather_seconds": self.gather_seconds,
            "push/send_seconds": self.send_seconds,
            "push/gigabytes": self.num_bytes / 1e9,
            **({} if self.changed is None else {"push/changed_values": self.changed}),
        }


class WeightPush(Protocol):
    """How weights are transferred, and which side uses the devices meanwhile."""

    def offload_generators(self) -> None:
        """Free the devices that generators share with the trainer, after the loop has its batch and before it
        trains."""
        ...

    def push(self, version: int) -> PushReport:
        """Return when every generator samples with the trainer's current weights, under this version."""
        ...


class FleetPush(WeightPush, Protocol):
    """A push to generators of which some may restart."""

    def generators_joined(self) -> None:
        """Count pushes from here on: the next one is the first for some generators."""
        ...


class RunPush(WeightPush, Protocol):
    """What the loop drives: a push that looks after the generators."""

    def sync_rejoined(self) -> None:
        """Send weights to generators that have rejoined; called about once a second while the loop waits for the
        generators."""
        ...


class ExportingTrainer(Protocol):
    """Trainer ranks that export their weights into the object store."""

    def export_weights(self, engine: str, bucket_bytes: int, timeout_seconds: float) -> tuple[list[Any], int]:
        """Return the handles of the buckets, and their size in bytes."""
        ...


class ReceivingGenerators(Protocol):
    """Generators that fetch buckets from the object store."""

    def receive(self, buckets: Sequence[Any], version: int, timeout_seconds: float) -> list[float]:
        """Load the buckets in every generator; return how long each one stopped sampling, in seconds."""
        ...


class LocalPush:
    """Through the object store: gathered on the trainer's first rank, fetched by every generator before it pauses."""

    def __init__(
        self, trainer: ExportingTrainer, generators: ReceivingGenerators, *, bucket_bytes: int, timeout_seconds: float
    ):
        self._trainer = trainer
        self._generators = generators
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout_seconds

    def offload_generators(self) -> None:
        """Do nothing: both sides share only the processor."""

    def generators_joined(self) -> None:
        """Do nothing: no push is verified."""

    def push(self, version: int) -> PushReport:
        start = time.perf_counter()
        buckets, num_bytes = self._trainer.export_weights("actor", self._bucket_bytes, self._timeout)
        exported = time.perf_counter()
        pauses = self._generators.receive(buckets, version, self._timeout)
        end = time.perf_counter()
        return PushReport(
            seconds=end - start,
            longest_pause_seconds=max(pauses),
            gather_seconds=exported - start,
            send_seconds=end - exported,
            num_bytes=num_bytes,
        )
