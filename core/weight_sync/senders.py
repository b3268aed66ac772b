"""The sender of each transport, in the ranks of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from core.weight_sync.buckets import Sender, SenderSettings
from core.weight_sync.disk import DiskSender
from core.weight_sync.ipc import IpcSender
from core.weight_sync.nccl import NcclSender
from core.weight_sync.sender_plan import SenderPlan

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
