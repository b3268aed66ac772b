"""Which transport weights take: a question of where trainer and generators are. Loads neither torch nor a sender: a
--dry-run reads this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from allocation import Allocation
from rollout.inference.backend import Transport
from rollout.inference.registry import BACKENDS

SHARED_MEMORY_NAMES = (
    *("sem.mp-", "psm_", "torch_", "nccl-", "plasma"),
    *(name for backend in BACKENDS.values() for name in backend.shared_memory_names),
)
"""How names in /dev/shm begin that Python's multiprocessing, torch, NCCL, Ray and the backends give."""


def choose_transport(requested: str, allocation: Allocation) -> Transport:
    """Return the transport of push.type=`requested` for this allocation. Raises ValueError where it is not possible."""
    backend = BACKENDS[allocation.generator.backend]
    transports = backend.capabilities.transports
    if requested != "auto" and requested not in transports:
        ways = " or ".join(", ".join(transports).rsplit(", ", 1))
        if requested == "local":
            raise ValueError(f"local is for generators inside this program; with {backend.label}s use {ways}, or auto")
        into = " and ".join(f"{b.label}s" for b in BACKENDS.values() if requested in b.capabilities.transports)
        raise ValueError(f"{requested} transfers weights to {into}; with {backend.label}s use {ways}, or auto")
    possible = [way for way in _possible(allocation) if way in transports]
    if requested in possible:
        return cast(Transport, requested)
    if requested == "auto" and possible:
        return possible[0]
    raise ValueError(_why_not(requested, allocation))


def _possible(allocation: Allocation) -> Sequence[Transport]:
    """Return the transports that reach the generators of this allocation, the best one first."""
    generator, trainer = allocation.generator, allocation.trainer
    if generator.layout.pp > 1:
        return BACKENDS[generator.backend].capabilities.staged_transports
    if generator.device != trainer.device:
        return ("local", "disk")
    shared = set(generator.slots) & set(trainer.slots)
    if not shared:
        return ("local", "nccl", "disk")
    return ("local", "ipc", "disk") if len(shared) == len(generator.slots) else ("local", "disk")


def _why_not(requested: str, allocation: Allocation) -> str:
    """Return why a transport that the backend has cannot reach the generators of this allocation."""
    generator, trainer = allocation.generator, allocation.trainer
    if generator.layout.pp > 1:
        return f"{requested} does not support servers with {generator.layout.pp} pipeline stages; use disk"
    if generator.device != trainer.device:
        return (
            f"{requested} needs both sides on one kind of device; the generators compute on {generator.device}, the "
            f"trainer on {trainer.device}: write disk, or auto"
        )
    if requested == "nccl":
        return "nccl requires servers on separate GPUs, but they share the trainer's; use ipc or auto"
    return "ipc requires every server on the trainer's GPUs, but some have others; use nccl or auto"
