"""Every inference backend and every transport of weights by name, and which transport reaches the replicas of an
allocation.

The senders are in core/weight_sync, one file for each. Neither torch nor a sender is imported here: a --dry-run reads
this file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from allocation import CPU, GPU, Allocation, Device
from rollout.inference.backend import Backend, TransportName
from rollout.inference.embedded import EmbeddedBackend
from rollout.inference.mock import MockBackend
from rollout.inference.sglang import SGLangBackend

BACKENDS: dict[str, Backend] = {
    "sglang": SGLangBackend(),
    "embedded": EmbeddedBackend(),
    "mock": MockBackend(),
}
"""Backends by their name in allocation_mode."""
DEFAULT_BACKEND: Mapping[Device, str] = {GPU: "sglang", CPU: "embedded"}
"""The backend of a run that names none, by the device that it samples on."""
SHARED_MEMORY_NAMES = (
    *("sem.mp-", "psm_", "torch_", "nccl-", "plasma"),
    *(name for backend in BACKENDS.values() for name in backend.shared_memory_names),
)
"""Prefixes of the names in /dev/shm that Python's multiprocessing, torch, NCCL, Ray and the backends create."""


@dataclass(frozen=True, kw_only=True)
class Transport:
    """One way of weights."""

    name: TransportName
    receivers: Literal["first", "all"]
    """Ranks of the trainer that receive full tensors."""
    why_not: Callable[[Allocation], str]
    """Return why it cannot reach the generators where both sides compute on one kind of device; empty: it can."""
    crosses_devices: bool = False
    """Whether the two sides may compute on different kinds of devices."""

    def reaches(self, allocation: Allocation) -> str:
        """Return why this transport does not reach the generators of an allocation, with a way out; empty where it
        does."""
        generator, trainer = allocation.generator, allocation.trainer
        capabilities = BACKENDS[generator.backend].capabilities
        if self.name not in capabilities.transports:
            return self._not_of_backend(generator.backend)
        if generator.layout.pp > 1 and self.name not in capabilities.staged_transports:
            return f"{self.name} does not support servers with {generator.layout.pp} pipeline stages; use disk"
        if generator.layout.pp == 1 and generator.device != trainer.device and not self.crosses_devices:
            return (
                f"{self.name} needs both sides on one kind of device; the generators compute on {generator.device}, "
                f"the trainer on {trainer.device}: write disk, or auto"
            )
        return self.why_not(allocation)

    def _not_of_backend(self, backend: str) -> str:
        label, transports = BACKENDS[backend].label, BACKENDS[backend].capabilities.transports
        ways = " or ".join(", ".join(transports).rsplit(", ", 1))
        if self.name == "local":
            return f"local is for generators inside this program; with {label}s use {ways}, or auto"
        into = " and ".join(f"{b.label}s" for b in BACKENDS.values() if self.name in b.capabilities.transports)
        return f"{self.name} transfers weights to {into}; with {label}s use {ways}, or auto"


def _separate(allocation: Allocation) -> str:
    shared = set(allocation.generator.slots) & set(allocation.trainer.slots)
    return "nccl requires servers on separate GPUs, but they share the trainer's; use ipc or auto" if shared else ""


def _shared(allocation: Allocation) -> str:
    apart = set(allocation.generator.slots) - set(allocation.trainer.slots)
    return "ipc requires every server on the trainer's GPUs, but some have others; use nccl or auto" if apart else ""


TRANSPORTS: Mapping[str, Transport] = {
    transport.name: transport
    for transport in (
        Transport(name="local", receivers="first", why_not=lambda _: "", crosses_devices=True),
        Transport(name="nccl", receivers="first", why_not=_separate),
        Transport(name="ipc", receivers="all", why_not=_shared),
        Transport(name="disk", receivers="first", why_not=lambda _: "", crosses_devices=True),
    )
}
"""Transports by name, the best one first."""
BROADCAST = TRANSPORTS["nccl"]
"""The one into the generators of other jobs."""


def choose_transport(requested: str, allocation: Allocation) -> Transport:
    """Return the transport of push.type=`requested` for this allocation; with auto the best one that reaches its
    generators. Raises ValueError where it does not."""
    candidates = [*TRANSPORTS.values()] if requested == "auto" else [TRANSPORTS[requested]]
    reasons = {transport.name: transport.reaches(allocation) for transport in candidates}
    for transport in candidates:
        if not reasons[transport.name]:
            return transport
    raise ValueError("; ".join(reasons.values()))
