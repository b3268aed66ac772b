"""Where a role computes, and why there: a fact of the allocation, decided before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "cuda"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
"""What a user may write; auto leaves the choice to the run, which reports it with the reason."""

CPU: Device = "cpu"
GPU: Device = "cuda"


@dataclass(frozen=True)
class DeviceDecision:
    """The device of a role, and the reason in words for the start-up table."""

    device: Device
    reason: str
