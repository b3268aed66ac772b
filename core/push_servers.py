"""`WeightPush` into SGLang servers: gather while they sample, pause, send, compare, resume.

The senders live in the trainer's ranks and post to the servers themselves, so a refusal is seen by the process that
waits in the broadcast. Pausing and resuming belong to whoever holds the requests: the generators.
Invariant: generation resumes only on complete weights. After a failure nothing resumes; the run ends with the error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from allocation import RoleAllocation
from core.push import PushReport
from core.push_disk import DiskSender
from core.push_ipc import IpcSender
from core.push_nccl import NcclSender
from rollout.sglang_weights import ServerAddress

if TYPE_CHECKING:
    from core.push_buckets import Sender, SendReport

logger = logging.getLogger(__name__)

Verify = Literal["never", "first", "always"]

SENDERS: Mapping[str, Callable[..., Sender]] = {"nccl": NcclSender, "ipc": IpcSender, "disk": DiskSender}
"""push.type -> what to make in every rank of the trainer."""


class TrainerSide(Protocol):
    """The ranks of the trainer. Every call reaches all of them; results in rank order."""

    def call(self, method: str, *args: object, **kwargs: object) -> list[Any]: ...


class GeneratorSide(Protocol):
    """All generators, one server each."""

    def pause(self, timeout_seconds: float) -> None:
        """Return when every one is paused."""
        ...

    def resume(self, version: int, timeout_seconds: float) -> list[float]:
        """Let every one go on; how long each one did not sample, in seconds."""
        ...


class ServerPush:
    """Through the senders that the trainer's ranks hold: they answer to `push_prepare` and `push_send`."""

    def __init__(
        self,
        trainer: TrainerSide,
        generators: GeneratorSide,
        *,
        bucket_bytes: int,
        verify: Verify,
        timeout_seconds: float,
    ) -> None:
        self._trainer, self._generators = trainer, generators
        self._bucket_bytes, self._verify, self._timeout = bucket_bytes, verify, timeout_seconds
        self._verified = False

    def push(self, version: int) -> PushReport:
        """Raises PushError, ServerError or ServerGone; generation stays paused then, and the run must end."""
        verify = self._verify == "always" or (self._verify == "first" and not self._verified)
        start = time.perf_counter()
        self._trainer.call("push_prepare", "actor", self._bucket_bytes, verify=verify)
        prepared = time.perf_counter()
        self._generators.pause(self._timeout)
        sent: SendReport = self._trainer.call("push_send")[0]
        pauses = self._generators.resume(version, self._timeout)
        self._verified |= verify
        logger.info(
            "Pushed version %d: %.2f GB in %d buckets, sent in %.3f s (%.1f GB/s) after %.3f s of gathering; "
            "generators paused for at most %.3f s%s",
            version, sent.num_bytes / 1e9, sent.num_buckets, sent.seconds, sent.num_bytes / 1e9 / sent.seconds,
            prepared - start, max(pauses), "; all checksums equal" if verify else "",
        )  # fmt: skip
        return PushReport(seconds=time.perf_counter() - start, longest_pause_seconds=max(pauses))


def beside_trainer(
    servers: Sequence[ServerAddress], generator: RoleAllocation, trainer: RoleAllocation
) -> list[ServerAddress]:
    """The addresses, in the order of the replicas, with the trainer's rank on each of a server's GPUs filled in (empty
    where there is none)."""
    rank_at = {slot: rank for rank, slot in enumerate(trainer.slots)}
    return [
        replace(server, trainer_ranks=tuple(rank_at[slot] for slot in slots[: server.tp] if slot in rank_at))
        for server, slots in zip(servers, generator.replicas, strict=True)
    ]
