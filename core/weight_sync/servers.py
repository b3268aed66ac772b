"""`WeightPush` into generators that serve: gather while they sample, pause, send, compare, resume.

The senders are in the trainer's ranks and post to the servers themselves, so a refusal is seen by the process that
waits in the broadcast. The generators, which hold the requests, pause and resume. Invariant: generation resumes only on
complete weights. After a failure nothing resumes; the run ends with the error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from allocation import RoleAllocation, Slot
from core.config.push import Changes, Verify
from core.weight_sync.base import PushReport
from core.weight_sync.buckets import SenderSettings
from core.weight_sync.disk import DiskSender
from core.weight_sync.ipc import IpcSender
from core.weight_sync.nccl import NcclSender
from mcore_adapter.hf.exporting import Receivers
from rollout.inference.backend import Quantization, Transport, WeightEndpoint

if TYPE_CHECKING:
    from core.weight_sync.buckets import Sender, SendReport

logger = logging.getLogger(__name__)


PUSHED = "actor"
"""The engine whose weights the generators sample with."""
SENDER_GRACE_SECONDS = 60.0
"""The sender's own deadline is push.timeout_seconds, and it can name the servers that did not answer and abort its
communicator before the driver gives up."""


@dataclass(frozen=True, kw_only=True)
class SenderPlan:
    """What every rank of the trainer makes its sender from."""

    type: Transport
    model_path: str
    """The servers' model folder: pushed folders get its config.json."""
    dtype: str
    """Format that the servers hold weights in."""
    bucket_bytes: int
    timeout_seconds: float
    folder: Path
    """For disk: a folder that trainer and servers share."""
    changes: Changes = "never"
    """For disk: whether to send only the values that have changed."""
    weight_format: Quantization = "auto"
    """Of the servers' linear layers."""

    @property
    def receivers(self) -> Receivers:
        """Which ranks of the trainer receive full tensors."""
        return "all" if self.type == "ipc" else "first"


def make_sender(plan: SenderPlan, *, rank: int, world_size: int, device: torch.device, host: str) -> Sender:
    """Return the sender of one rank, not yet connected. `host`: its node's address."""
    settings = SenderSettings(
        rank=rank,
        world_size=world_size,
        dtype=getattr(torch, plan.dtype),
        timeout_seconds=plan.timeout_seconds,
        bucket_bytes=plan.bucket_bytes,
        weight_format=plan.weight_format,
    )
    if plan.type == "nccl":
        return NcclSender(settings, device, host=host)
    if plan.type == "ipc":
        return IpcSender(settings, device)
    assert plan.type == "disk", "local pushes have no sender"
    return DiskSender(settings, device, folder=plan.folder, model_path=plan.model_path, changes=plan.changes)


class TrainerSide(Protocol):
    """The ranks of the trainer. Every call reaches all of them."""

    def push_prepare(self, engine: str, bucket_bytes: int, *, verify: bool, timeout_seconds: float) -> None:
        """Gather the first buckets of the engine's weights."""
        ...

    def push_send(self, timeout_seconds: float) -> SendReport:
        """Send what was prepared to every server; return the first rank's report."""
        ...

    def offload(self, keep: str) -> None:
        """Leave the device to the generators, but for the weights of the engine `keep`."""
        ...

    def reload(self) -> None:
        """Undo offload()."""
        ...


class GeneratorSide(Protocol):
    """All generators, one server each."""

    def pause(self, timeout_seconds: float) -> None:
        """Return when every one is paused."""
        ...

    def resume(self, version: int, timeout_seconds: float) -> list[float]:
        """Resume every generator; return how long each one did not sample, in seconds."""
        ...


G = TypeVar("G", bound=GeneratorSide)


class ServerPush(Generic[G]):
    """Through the senders that the trainer's ranks hold: they answer to `push_prepare` and `push_send`."""

    def __init__(
        self,
        trainer: TrainerSide,
        generators: G,
        *,
        bucket_bytes: int,
        verify: Verify,
        timeout_seconds: float,
    ) -> None:
        self._trainer, self._generators = trainer, generators
        self._bucket_bytes, self._verify, self._timeout = bucket_bytes, verify, timeout_seconds
        self._num_pushes = 0

    def offload_generators(self) -> None:
        """Do nothing: the servers have devices of their own."""

    def generators_joined(self) -> None:
        """Verify as at the start."""
        self._num_pushes = 0

    def push(self, version: int) -> PushReport:
        """Push the weights of `version`. Raises PushError, GeneratorCallError or GeneratorGone; generation stays paused
        then; the run must end."""
        start = time.perf_counter()
        self._prepare()
        prepared = time.perf_counter()
        self._generators.pause(self._timeout)
        sent = self._send()
        pauses = self._generators.resume(version, self._timeout)
        self._num_pushes += 1
        return push_report(version, sent, pauses, start=start, gather_seconds=prepared - start)

    def _prepare(self) -> None:
        """Gather and lay out buckets on every rank of the trainer."""
        verify = due(self._verify, self._num_pushes)
        limit = self._timeout + SENDER_GRACE_SECONDS
        self._trainer.push_prepare(PUSHED, self._bucket_bytes, verify=verify, timeout_seconds=limit)

    def _send(self) -> SendReport:
        """Move every bucket; return the report of rank 0."""
        return self._trainer.push_send(self._timeout + SENDER_GRACE_SECONDS)


def due(verify: Verify, num_pushes: int) -> bool:
    """Return whether the push after `num_pushes` others is to be verified. In the first one a server
    finds parameters by their names; from the second one on it may copy to the same places."""
    return verify == "always" or (verify == "first" and num_pushes < 2)


def push_report(
    version: int, sent: SendReport, pauses: Sequence[float], *, start: float, gather_seconds: float
) -> PushReport:
    """Log what a push cost that began at `start` and made its first buckets in `gather_seconds`."""
    report = PushReport(
        seconds=time.perf_counter() - start,
        longest_pause_seconds=max(pauses),
        gather_seconds=gather_seconds,
        send_seconds=sent.seconds,
        num_bytes=sent.num_bytes,
        changed=sent.changed,
    )
    logger.info(
        "Pushed version %d: %.2f GB in %d buckets%s, sent in %.3f s (%.1f GB/s) after %.3f s of gathering; "
        "generators paused for at most %.3f s%s",
        version, sent.num_bytes / 1e9, sent.num_buckets,
        "" if sent.changed is None else f" (the {sent.changed:.2%} of the values that have changed)",
        sent.seconds, sent.num_bytes / 1e9 / sent.seconds,
        report.gather_seconds, report.longest_pause_seconds, sent.compared and f"; {sent.compared}",
    )  # fmt: skip
    return report


def with_colocated_ranks(
    servers: Sequence[WeightEndpoint], replicas: Sequence[Sequence[Slot]], trainer: RoleAllocation
) -> list[WeightEndpoint]:
    """Return the endpoints, each on the slots of its replica, with the trainer's rank on each of a server's GPUs filled
    in (empty where there is none)."""
    rank_at = {slot: rank for rank, slot in enumerate(trainer.slots)}
    return [
        server.beside(tuple(rank_at[slot] for slot in slots[: server.tp] if slot in rank_at))
        for server, slots in zip(servers, replicas, strict=True)
    ]
