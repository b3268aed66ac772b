"""Section `push`, and which transport a run gets: a question of where trainer and generators are.

Neither torch nor a sender is imported here: a --dry-run reads this file.
"""

from __future__ import annotations

from typing import Literal, cast

from allocation import Allocation
from core.config.base import Section, key

PushType = Literal["local", "nccl", "ipc", "disk"]
Verify = Literal["never", "first", "always"]


SHARED_MEMORY_NAMES = ("sem.mp-", "psm_", "torch_", "nccl-", "plasma", "sglang")
"""How names in /dev/shm begin that Python's multiprocessing, torch, NCCL, Ray and SGLang give."""


class PushConfig(Section):
    """Weight push from the trainer to the generators."""

    type: Literal["auto", "local", "nccl", "ipc", "disk"] = key(
        "auto",
        "How weights travel. nccl: broadcast to servers on GPUs of their own. ipc: memory shared with servers on the "
        "trainer's GPUs. disk: files that servers anywhere read. local: through the object store, for "
        "embedded generators. auto: whichever of them the allocation asks for",
    )
    verify: Verify = key(
        "first", "Compare checksums of all tensors on the SGLang servers with what was sent: after which pushes"
    )
    bucket_mib: int = key(1024, "Size of the pieces that weights travel in, MiB", ge=1)
    timeout_seconds: float = key(120.0, "A push that takes longer fails the run", gt=0)


def choose_transport(asked: str, allocation: Allocation) -> PushType:
    """What push.type=`asked` means for this allocation. Raises ValueError where it cannot work."""
    generator = allocation.generator
    if generator.backend != "sglang":
        if asked in ("auto", "local"):
            return "local"
        raise ValueError(f"{asked} is a way into SGLang servers; {generator.backend} generators take local, or auto")
    if asked == "local":
        raise ValueError("local is for generators inside this program; SGLang servers take nccl, ipc or disk, or auto")
    shared = set(generator.slots) & set(allocation.trainer.slots)
    if asked == "auto":
        if generator.layout.pp > 1 or (shared and len(shared) < len(generator.slots)):
            return "disk"
        return "ipc" if shared else "nccl"
    if asked in ("nccl", "ipc") and generator.layout.pp > 1:
        raise ValueError(f"{asked} cannot reach servers of {generator.layout.pp} pipeline stages; write disk, or auto")
    if asked == "nccl" and shared:
        raise ValueError("nccl needs servers on GPUs of their own; they are the trainer's here: write ipc, or auto")
    if asked == "ipc" and len(shared) < len(generator.slots):
        raise ValueError("ipc needs every server on the trainer's own GPUs; they are apart here: write nccl, or auto")
    return cast(PushType, asked)
