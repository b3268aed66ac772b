"""Section `push`, and which transport a run gets: a question of where trainer and generators are.

Neither torch nor a sender is imported here: a --dry-run reads this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from allocation import Allocation
from core.config.base import Section, key
from rollout.inference.backend import Transport
from rollout.inference.registry import BACKENDS

Verify = Literal["never", "first", "always"]

SHARED_MEMORY_NAMES = (
    *("sem.mp-", "psm_", "torch_", "nccl-", "plasma"),
    *(name for backend in BACKENDS.values() for name in backend.shared_memory_names),
)
"""How names in /dev/shm begin that Python's multiprocessing, torch, NCCL, Ray and the backends give."""


class PushConfig(Section):
    """Weight push from the trainer to the generators."""

    type: Literal["auto", "local", "nccl", "ipc", "disk"] = key(
        "auto",
        "How weights travel. nccl: broadcast to servers on GPUs of their own. ipc: memory shared with servers on the "
        "trainer's GPUs. disk: files that servers anywhere read. local: through the object store, for "
        "embedded generators. auto: whichever of them the allocation asks for",
    )
    verify: Verify = key(
        "first", "Compare checksums of all tensors on the generators' servers with what was sent: after which pushes"
    )
    bucket_mib: int = key(1024, "Size of the pieces that weights travel in, MiB", ge=1)
    timeout_seconds: float = key(120.0, "A push that takes longer fails the run", gt=0)


def choose_transport(asked: str, allocation: Allocation) -> Transport:
    """What push.type=`asked` means for this allocation. Raises ValueError where it cannot work."""
    backend = BACKENDS[allocation.generator.backend]
    transports = backend.capabilities.transports
    if asked != "auto" and asked not in transports:
        ways = " or ".join(", ".join(transports).rsplit(", ", 1))
        if asked == "local":
            raise ValueError(f"local is for generators inside this program; {backend.label}s take {ways}, or auto")
        into = " and ".join(f"{b.label}s" for b in BACKENDS.values() if asked in b.capabilities.transports)
        raise ValueError(f"{asked} is a way into {into}; {backend.label}s take {ways}, or auto")
    possible = [way for way in _possible(allocation) if way in transports]
    if asked in possible:
        return cast(Transport, asked)
    if asked == "auto" and possible:
        return possible[0]
    raise ValueError(_why_not(asked, allocation))


def _possible(allocation: Allocation) -> Sequence[Transport]:
    """Transports that reach the generators where these are, the best one first."""
    generator, trainer = allocation.generator, allocation.trainer
    if generator.layout.pp > 1:
        return BACKENDS[generator.backend].capabilities.staged_transports
    if generator.device != trainer.device:
        return ("local", "disk")
    shared = set(generator.slots) & set(trainer.slots)
    if not shared:
        return ("local", "nccl", "disk")
    return ("local", "ipc", "disk") if len(shared) == len(generator.slots) else ("local", "disk")


def _why_not(asked: str, allocation: Allocation) -> str:
    """Why a transport that the backend has cannot reach the generators of this allocation."""
    generator, trainer = allocation.generator, allocation.trainer
    if generator.layout.pp > 1:
        return f"{asked} cannot reach servers of {generator.layout.pp} pipeline stages; write disk, or auto"
    if generator.device != trainer.device:
        return (
            f"{asked} needs both sides on one kind of device; the generators compute on {generator.device}, the "
            f"trainer on {trainer.device}: write disk, or auto"
        )
    if asked == "nccl":
        return "nccl needs servers on GPUs of their own; they are the trainer's here: write ipc, or auto"
    return "ipc needs every server on the trainer's own GPUs; they are apart here: write nccl, or auto"
