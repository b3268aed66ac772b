"""Published weights in the place of the trainer's ranks: what the weight push of an explore job sends.

It implements `core.weight_sync.push.Trainer`, so generators that restart get their weights as in any other run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from safetensors.torch import load_file

from core.weight_sync.calls import Deadline, SenderSettings, SendReport, call_all
from core.weight_sync.push import WeightPush
from rollout.bucket import FlatBucket
from rollout.inference.backend import TransportName, WeightEndpoint
from rollout.inference.registry import BACKENDS
from rollout.inference.versions import Published, Subscription

if TYPE_CHECKING:
    from core.data.stored_batch import Ref


def transport_of(backend: str) -> TransportName:
    """Return how published weights reach the generators of a backend."""
    return "local" if "local" in BACKENDS[backend].capabilities.transports else "disk"


class PublishedWeights:
    """The Hugging Face folder of one version, which generators load."""

    def __init__(self) -> None:
        self.current: Published | None = None
        self._servers: Sequence[WeightEndpoint] = ()

    @property
    def _files(self) -> list[Path]:
        assert self.current is not None, "follow() claims a version first"
        return sorted(Path(self.current.where).glob("*.safetensors"))

    def export_weights(self, engine: str, bucket_bytes: int, timeout_seconds: float) -> tuple[list[Ref], int]:
        """Return the files as buckets in the object store, and their bytes."""
        placed, num_bytes = [], 0
        for file in self._files:  # one at a time in the memory of this process
            bucket = FlatBucket.of(load_file(file))
            placed.append(ray.put(bucket))
            num_bytes += bucket.num_bytes
        return placed, num_bytes

    def push_connect(self, plan: SenderSettings, servers: Sequence[WeightEndpoint]) -> None:
        """Send to these servers from now on."""
        self._servers = servers

    def push_prepare(self, engine: str, bucket_bytes: int, *, verify: bool, timeout_seconds: float) -> None:
        """Do nothing: the folder is written."""

    def push_send(self, timeout_seconds: float) -> SendReport:
        """Let every server load the folder. Raises PushError."""
        assert self.current is not None, "follow() claims a version first"
        began, where, files = time.perf_counter(), self.current.where, self._files
        deadline = Deadline(timeout_seconds)
        loading = call_all(
            self._servers, lambda server, left: server.load_folder(where, timeout_seconds=left), deadline
        )
        deadline.wait(loading, f"reading {where}")
        num_bytes = sum(file.stat().st_size for file in files)
        return SendReport(seconds=time.perf_counter() - began, num_bytes=num_bytes, num_buckets=len(files))

    def push_close(self) -> None:
        """Do nothing: a folder needs no connection."""

    def offload(self, keep: str) -> None:
        """Do nothing: there is no trainer on the GPUs of the generators."""

    def reload(self) -> None:
        """Do nothing, as offload()."""


def load(model: str, version: int, weights: PublishedWeights, push: WeightPush) -> None:
    """Let the generators load a Hugging Face folder as `version`."""
    weights.current = Published(version=version, where=str(Path(model).expanduser()))
    push.push(version)


def follow(subscription: Subscription, weights: PublishedWeights, push: WeightPush) -> int | None:
    """Bring the generators to the latest version and return it; None where they have it already."""
    published = subscription.claim()
    if published is None:
        return None
    weights.current = published
    push.push(published.version)
    subscription.hold(published.version)
    return published.version
