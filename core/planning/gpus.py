"""Memory of GPUs, by name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rollout.inference.gpus import query_gpus


class PlanError(ValueError):
    """A plan that cannot be made. The message names what is wrong and the way out."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as torch sees it."""

    name: str
    gib: float
    """Memory in total."""


GPUS: dict[str, Gpu] = {
    "H100": Gpu(name="H100", gib=79.1),
    "H200": Gpu(name="H200", gib=139.8),
    "A100": Gpu(name="A100", gib=79.1),
}
"""Key: name as in --gpu."""
_FORMAT = re.compile(r"(?P<name>[A-Za-z0-9-]+):(?P<gib>(?!0+(\.0*)?$)\d+(\.\d+)?)")


def gpu_of_machine() -> Gpu | None:
    """Return the first GPU of this machine, one that is not in the table with its memory alone; None without any."""
    found = query_gpus()
    if not found:
        return None
    try:
        return find_gpu(found[0].name)
    except PlanError:
        return Gpu(name=found[0].name, gib=found[0].total_mib / 1024)


def find_gpu(text: str) -> Gpu:
    """Return the GPU of a name, "H100" or as the driver writes it, "NVIDIA H100 80GB HBM3"; or of NAME:GIB. Raises
    PlanError for another one."""
    if match := _FORMAT.fullmatch(text):
        return Gpu(name=match["name"], gib=float(match["gib"]))
    for name, gpu in GPUS.items():
        if re.search(rf"\b{name}\b(?!:)", text, re.IGNORECASE):
            return gpu
    raise PlanError(
        f"--gpu {text}: unknown; known: {', '.join(GPUS)}. Write NAME:GIB, as in B200:178, for a plan of memory alone; "
        "times need a calibration (--calibrate), see docs/planner.md"
    )


def chosen_gpu(name: str | None = None) -> Gpu:
    """Return the GPU that is named, or that of this machine; without one an H100. Raises PlanError."""
    if name is not None:
        return find_gpu(name)
    return gpu_of_machine() or find_gpu("H100")
