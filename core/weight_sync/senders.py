"""What every rank of the trainer makes its sender from, and the sender of each transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from allocation import RoleAllocation, Slot
from core.config.runtime import Changes
from core.weight_sync.buckets import Sender, SenderSettings
from core.weight_sync.disk import DiskSender
from core.weight_sync.ipc import IpcSender
from core.weight_sync.nccl import NcclSender
from rollout.inference.backend import Quantization, TransportName, WeightEndpoint


@dataclass(frozen=True, kw_only=True)
class SenderPlan:
    """What every rank of the trainer makes its sender from."""

    type: TransportName
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


SENDERS: Mapping[str, Callable[[SenderSettings, torch.device, SenderPlan, str], Sender]] = {
    "nccl": lambda settings, device, plan, host: NcclSender(settings, device, host=host),
    "ipc": lambda settings, device, plan, host: IpcSender(settings, device),
    "disk": lambda settings, device, plan, host: DiskSender(
        settings, device, folder=plan.folder, model_path=plan.model_path, changes=plan.changes
    ),
}
"""By transport; rollout/inference/transports.py has which one a run gets. Local pushes have no sender."""


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
    return SENDERS[plan.type](settings, device, plan, host)


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
