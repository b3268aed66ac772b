"""A model of given widths, and rows about its memory, for the measurements of long sequences and of experts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from mcore_adapter.memory.auto import Peak
from model_specs.hf_config import parse_config
from tools.bench.figure import Figure
from tools.bench.gpu.trainer import Scene, ppo_update, seconds_of

GB = 1e9

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WidthsScene(Scene):
    """A Scene whose model has the widths of a config.json."""

    raw: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.raw["vocab_size"])

    @property
    def model(self) -> Path:
        text = json.dumps(self.raw, sort_keys=True)
        # Measurements of one call share the folder; ranks read the file while others look for it.
        path = self.folder / f"widths-{sha256(text.encode()).hexdigest()[:12]}"
        if not path.exists():
            path.mkdir()
            (path / "config.json").write_text(text)
        return path

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of forward and backward of a causal sequence, without the embedding look-up; of experts, the
        chosen ones."""
        config = parse_config(self.raw)
        hidden, width = config.hidden_size, config.num_heads * config.head_dim
        attention = hidden * (2 * width + 2 * config.num_kv_heads * config.head_dim)
        if (moe := config.moe) is None:
            mlp = 3 * hidden * config.intermediate_size
        else:
            mlp = hidden * (moe.num_experts + 3 * moe.top_k * moe.intermediate_size)
        matrices = config.num_layers * (attention + mlp) + config.vocab_size * hidden
        return 6 * matrices + 6 * config.num_layers * width * length


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The last of some updates, in seconds and bytes."""

    tokens_per_second: float
    peak: float
    held: float
    """Before the update."""
    parts: dict[str, float]
    """Bytes held before the update, by their purpose."""
    activations: Peak | None
    """With recompute="auto": the last that were measured."""


def measure(engine: Any, device: Any, batch: Any, tokens_per_mb: int, *, updates: int, label: str) -> Measured:
    """Run updates, log each, and return the fastest of the second half. The first of a size take memory, and correct
    the choice."""

    def timed() -> float:
        return seconds_of(device, lambda: ppo_update(engine, batch, tokens_per_mb))

    found: list[Measured] = []
    for number in range(updates):
        device.forget_peak()
        held = device.memory_stats()["allocated_gib"] * 2**30
        seconds = timed()
        stats = device.memory_stats()
        one = Measured(
            tokens_per_second=batch.num_tokens / seconds,
            peak=stats["peak_gib"] * 2**30,
            held=held,
            parts=engine.held_bytes(),
            activations=engine.recompute_peak,
        )
        logger.info(
            "%s, update %d: %.2f s, peak %.1f GB, %.1f before, %d times out of cache; %s",
            label,
            number,
            seconds,
            one.peak / GB,
            held / GB,
            stats["allocator_retries"],
            one.activations and one.activations.choice,
        )
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
