"""The sender of each transport, in the ranks of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from core.weight_sync.buckets import Sender
from core.weight_sync.disk import DiskSender
from core.weight_sync.ipc import IpcSender
from core.weight_sync.nccl import NcclSender
from core.weight_sync.push import SenderSettings

SENDERS: Mapping[str, Callable[[SenderSettings], Sender]] = {"nccl": NcclSender, "ipc": IpcSender, "disk": DiskSender}
"""Senders by transport, which rollout/inference/registry.py chooses. Local pushes have none."""
