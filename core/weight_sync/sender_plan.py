"""Values that the driver passes to the senders in the trainer's ranks, and gets from them.

Without the libraries of the senders, which load for seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allocation import RoleAllocation, Slot
from core.config.runtime import Changes
from rollout.inference.backend import Quantization, TransportName, WeightEndpoint


@dataclass(frozen=True, kw_only=True)
class SenderSettings:
    """Settings of a run's weight updates, and the place of one rank of the trainer."""

    type: TransportName
    model_path: str = ""
    """The servers' model folder: pushed folders get its config.json."""
    dtype: str
    """Format that the servers hold weights in."""
    bucket_bytes: int
    timeout_seconds: float
    """Time limit for `send` as a whole, and for joining the servers."""
    weight_format: Quantization = "auto"
    """fp8_block: weights of linear layers are quantized, once, by every rank that receives full tensors."""
    folder: Path = Path()
    """disk: a folder of this run alone, on a file system that trainer and servers share."""
    changes: Changes = "never"
    """disk: whether to send only the values that have changed."""
    staged_bytes: int | None = None
    """Most bytes laid out before the pause, on every rank. None: what the device has to spare."""
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    host: str = "127.0.0.1"
    """Address of the rank's node that the servers reach."""


@dataclass(frozen=True, kw_only=True)
class SendReport:
    """Cost of one `send`."""

    seconds: float
    num_bytes: int
    num_buckets: int
    compared: str = ""
    """Result of compare_checksums, where it was requested."""
    changed: float | None = None
    """Share of the values that have changed, where only those were sent."""


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
