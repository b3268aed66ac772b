"""Kernels of one update, by torch's profiler: what `python -m tools.bench gpu --profile FOLDER` writes.

Each measured update of an engine gets a file of its own, named for its label. Without a GPU the tables are empty.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.profiler import profile

KINDS = {
    "attention": r"flash|fmha|sdpa|attention|cudnn.*attn",
    "grouped products of experts": r"grouped|GroupProblem",
    "other matrix products": r"nvjet|gemm|cutlass|cublas",
    "communication": r"nccl",
    "optimizer": r"adam|multi_tensor",
    "memory copies": r"^Memcpy|^Memset",
    "elementwise, Triton": r"elementwise|vectorized|triton|^_\w+_kernel",
}
"""Kinds of kernels by a pattern of their names, in upper or lower case. The first that matches counts."""
OTHER = "other"
CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
"""What a GPU runs, in traces of torch's profiler."""
LONGEST, NAME_LENGTH = 25, 120
"""Kernels that are listed by name, and characters of a name."""


class Kernel(NamedTuple):
    """One launch; times in microseconds."""

    name: str
    start: float
    duration: float


def write_profile(folder: Path, label: str, update: Callable[[], float], *, fastest_seconds: float) -> None:
    """Run one more update, which returns its seconds, on every rank; write the kernels of the first rank's."""
    if dist.is_initialized() and dist.get_rank() != 0:
        update()
        return
    with profile() as profiled:
        seconds = update()
    with tempfile.TemporaryDirectory() as temporary:
        trace = Path(temporary) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        kernels = kernels_of(json.loads(trace.read_text())["traceEvents"])
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.]+", "-", label).strip("-")
    text = report(label, kernels, seconds=seconds, fastest_seconds=fastest_seconds)
    (folder / f"{name}.md").write_text(text)


def kernels_of(events: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """Return what a GPU ran among the events of a trace."""
    return [Kernel(event["name"], event["ts"], event["dur"]) for event in events if event.get("cat") in CATEGORIES]


def report(label: str, kernels: Sequence[Kernel], *, seconds: float, fastest_seconds: float) -> str:
    """Return the Markdown text: a line about the update, kernels by kind, and the longest by name."""
    total = sum(kernel.duration for kernel in kernels)
    lines = [
        f"{label}: {seconds:.3f} s with the profiler, {fastest_seconds:.3f} s the fastest without; kernels "
        f"{total / 1e3:.1f} ms, at least one of them during {busy(kernels) / 1e3:.1f} ms; {len(kernels)} launches",
        "\n| kind | ms | launches | share |\n|---|---|---|---|",
    ]
    for kind, time, count in summed((kind_of(kernel.name), kernel.duration) for kernel in kernels):
        lines.append(f"| {kind} | {time / 1e3:.1f} | {count} | {time / total:.1%} |")
    lines.append("\n| ms | launches | name |\n|---|---|---|")
    for name, time, count in summed((kernel.name, kernel.duration) for kernel in kernels)[:LONGEST]:
        lines.append(f"| {time / 1e3:.1f} | {count} | `{name[:NAME_LENGTH]}` |")
    return "\n".join(lines) + "\n"


def kind_of(name: str) -> str:
    """Return the kind of a kernel of this name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def summed(durations: Iterable[tuple[str, float]]) -> list[tuple[str, float, int]]:
    """Return (key, sum, number) of each key, the largest sum first."""
    found: dict[str, list[float]] = {}
    for key, duration in durations:
        found.setdefault(key, []).append(duration)
    return sorted(((key, sum(times), len(times)) for key, times in found.items()), key=lambda one: -one[1])


def busy(kernels: Iterable[Kernel]) -> float:
    """Return the microseconds in which at least one kernel ran, on whatever stream."""
    total, end = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        stop = kernel.start + kernel.duration
        total += max(0.0, stop - max(kernel.start, end))
        end = max(end, stop)
    return total
