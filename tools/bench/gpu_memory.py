"""Rows about the memory of an update, which the measurements of long sequences and of experts share."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_adapter.activations.auto import Peak
from tools.bench.figure import Figure
from tools.bench.gpu import ppo_update, seconds_of

GB = 1e9

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The last of some updates, in seconds and bytes."""

    tokens_per_second: float
    peak: float
    held: float
    """Before the update."""
    parts: dict[str, float]
    """Of what is held."""
    activations: Peak | None
    """With recompute="auto": the last that were measured."""


def measure(engine: Any, device: Any, batch: Any, tokens_per_mb: int, *, updates: int, label: str) -> Measured:
    """Run updates, log each, and return the fastest of the second half. The first of a size take memory, and correct
    the choice."""
    found: list[Measured] = []
    for number in range(updates):
        device.forget_peak()
        held = device.memory_stats()["allocated_gib"] * 2**30
        seconds = seconds_of(device, lambda: ppo_update(engine, batch, tokens_per_mb))
        stats = device.memory_stats()
        one = Measured(
            tokens_per_second=batch.num_tokens / seconds, peak=stats["peak_gib"] * 2**30, held=held,
            parts=engine.held_bytes(), activations=engine.recompute_peak,
        )  # fmt: skip
        logger.info(
            "%s, update %d: %.2f s, peak %.1f GB, %.1f before, %d times out of cache; %s",
            label, number, seconds, one.peak / GB, held / GB, stats["allocator_retries"],
            one.activations and one.activations.choice,
        )  # fmt: skip
        found.append(one)
    return max(found[updates // 2 :], key=lambda one: one.tokens_per_second)


def rows(name: str, ours: Measured, bare: Measured | None, *, target: str) -> Iterator[Figure]:
    """Yield the peak, what it consists of, and activations against their estimate."""
    baseline = None if bare is None else bare.peak / GB
    yield Figure(name=f"memory.{name}", value=ours.peak / GB, unit="GB", baseline=baseline, target=target)
    for part, size in ours.parts.items():
        yield Figure(name=f"memory.{name}_{part}", value=size / GB, unit="GB", baseline=None, target="")
    if ours.activations is not None:
        value, estimate = ours.activations.measured / GB, ours.activations.estimated / GB
        yield Figure(name=f"memory.{name}_activations", value=value, unit="GB", baseline=estimate, target="<= 1.0x")


def mfu_rows(
    name: str, ours: Measured, bare: Measured | None, *, flops_per_token: float, peak_flops: float, target: str
) -> Iterator[Figure]:
    """Yield tokens/s and the model FLOPs utilization, which counts nothing that is computed twice."""
    rates: Sequence[float | None] = (ours.tokens_per_second, None if bare is None else bare.tokens_per_second)
    yield Figure(
        name=f"{name}_tokens_per_second", value=ours.tokens_per_second, unit="tokens/s", baseline=rates[1], target=""
    )
    mfu, bare_mfu = (None if rate is None else 100 * rate * flops_per_token / peak_flops for rate in rates)
    yield Figure(name=f"{name}_mfu", value=mfu or 0.0, unit="%", baseline=bare_mfu, target=target)
