"""The measurements `experts` and `long` of `python -m tools.bench gpu`: updates that fill a GPU.

`experts` compares stacked experts (mcore_adapter/models/experts.py) with TransformerEngine's grouped layers and
with Megatron's own training loop, `long` the least recomputation that fits with that of full layers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mcore_adapter.data.batch import PackedBatch
from mcore_adapter.device import Device
from mcore_adapter.engine import MegatronEngine
from mcore_adapter.memory.auto import Peak
from mcore_adapter.memory.out_of_memory import StepOutOfMemory
from mcore_adapter.models.bare_loop import Fused
from model_specs.hf_config import parse_config
from rollout.inference.gpus import query_gpus
from tools.bench import Figure
from tools.bench.gpu.shapes import SLICE, WIDTHS
from tools.bench.gpu.trainer import (
    PEAK_FLOPS,
    ROUNDS,
    WARM_UP,
    Scene,
    fastest_bare_rate,
    free,
    make_engine,
    ppo_update,
    random_batch,
    seconds_of,
    trainer_world,
)

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
    """With gradient_checkpointing="auto": the last that were measured."""


def measure(
    engine: MegatronEngine, device: Device, batch: PackedBatch, tokens_per_mb: int, *, updates: int, label: str
) -> Measured:
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


LENGTH, SEQUENCES = 4096, 32
LIMIT_GB = 90
_SMALL = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=512,
)
_SMALL_EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
"""What differs where there is no GPU."""
FUSED: tuple[Fused, ...] = ("permutation", "routing", "weight_gradients")
"""Kernels of TransformerEngine in Megatron's own loop. With its cross entropy, the gradients are infinite."""


def experts(scene: Scene) -> Iterator[Figure]:
    """Yield PPO updates of 131,072 tokens in microbatches of 32,768 and 16,384. One GPU."""
    small = not query_gpus()
    ours = WidthsScene(folder=scene.folder, raw=SLICE | _SMALL | _SMALL_EXPERTS if small else SLICE)
    length, count, sizes = (32, 4, (64, 32)) if small else (LENGTH, SEQUENCES, (32768, 16384))
    grouped, stacked = (_measure_experts(ours, length, count, sizes, stacked=way) for way in (False, True))
    flops = ours.flops_per_token(length)

    def compared(
        name: str, size: int, value: Mapping[int, Measured], baseline: Mapping[int, Measured], target: str
    ) -> Iterator[Figure]:
        yield from mfu_rows(
            f"update.{name}",
            value[size],
            baseline[size],
            flops_per_token=flops,
            peak_flops=PEAK_FLOPS,
            target=">= 38, aim 45" if size == max(sizes) else ">= 30",
        )
        yield from rows(name, value[size], baseline[size], target=target)

    for size in sizes:
        yield from compared(f"experts_{size}", size, stacked, grouped, "")
    # The least recomputation that fits into LIMIT_GB, against selective recomputation.
    settings = {"gradient_checkpointing": "auto", "gradient_checkpointing_limit_gib": LIMIT_GB * 1e9 / 2**30}
    within = _measure_experts(ours, length, count, sizes, stacked=True, settings=settings)
    for size in sizes:
        yield from compared(f"experts_{size}_auto", size, within, stacked, f"<= {LIMIT_GB}")
    for size in sizes:
        if (found := _megatron(ours, length, count, size, () if small else FUSED)) is not None:
            rate, peak = found
            label, value = f"update.experts_{size}_megatron", stacked[size].tokens_per_second
            yield Figure(name=f"{label}_tokens_per_second", value=value, unit="tokens/s", baseline=rate, target="")
            value = stacked[size].peak / GB
            yield Figure(name=f"memory.experts_{size}_megatron", value=value, unit="GB", baseline=peak, target="")


def _megatron(
    scene: WidthsScene, length: int, count: int, size: int, fused: tuple[Fused, ...]
) -> tuple[float, float] | None:
    """Return (tokens/s, peak GB) of Megatron's own loop, with fused kernels or without, whichever is faster; None if
    both ran out of memory."""
    with trainer_world() as (parallel, device):
        device.has_grouped_products = False
        batch = random_batch(scene.vocab_size, [length] * count)
        choices = [fused, ()] if fused else [()]
        return fastest_bare_rate(scene, parallel, device, batch, size, choices=choices, of=min)


def _measure_experts(
    scene: WidthsScene,
    length: int,
    count: int,
    sizes: tuple[int, ...],
    *,
    stacked: bool,
    settings: Mapping[str, Any] = MappingProxyType({"gradient_checkpointing": "selective"}),
) -> dict[int, Measured]:
    """Return the updates by the tokens of a microbatch."""
    with trainer_world() as (parallel, device):
        device.has_grouped_products = stacked
        batch = random_batch(scene.vocab_size, [length] * count)
        engine = make_engine(scene, parallel, device, **settings)
        label = f"experts, {settings['gradient_checkpointing']}, {'stacked' if stacked else 'grouped layers'}"
        measured = {
            size: measure(engine, device, batch, size, updates=WARM_UP + ROUNDS, label=f"{label}, {size}")
            for size in sizes
        }
        del engine
        free(device)
    return measured


LENGTHS = (65536, 131072)
NAME = "4B"


def long(scene: Scene) -> Iterator[Figure]:
    """Yield PPO updates on one sequence of 65,536 tokens, against recomputation of all layers as a whole, and on one of
    131,072 tokens, against the same without host memory for activations. A microbatch each. One GPU."""
    small = not query_gpus()
    ours = WidthsScene(folder=scene.folder, raw=WIDTHS | _SMALL if small else WIDTHS)
    lengths = (64, 128) if small else LENGTHS
    baselines: tuple[dict[str, Any], ...] = (
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": "auto", "gradient_checkpointing_host_gib": 0.0},
    )
    for length, baseline, target in zip(lengths, baselines, (">= 45", "fits"), strict=True):
        if (auto := _measure_long(ours, length, gradient_checkpointing="auto")) is None:
            return  # it did not fit; the log has the error
        bare = _measure_long(ours, length, **baseline)
        name, flops = f"long.{NAME}_{length}", ours.flops_per_token(length)
        yield from mfu_rows(name, auto, bare, flops_per_token=flops, peak_flops=PEAK_FLOPS, target=target)
        yield from rows(name, auto, bare, target="")


def _measure_long(scene: WidthsScene, length: int, **settings: Any) -> Measured | None:
    """Return the updates on one sequence, by an engine of their own; None where they do not fit."""
    measured: Measured | None = None
    with trainer_world() as (parallel, device):
        engine = make_engine(scene, parallel, device, **settings)
        ppo_update(engine, random_batch(scene.vocab_size, [length // 16]), length)  # kernels and moments
        batch = random_batch(scene.vocab_size, [length])
        updates = 3 if settings["gradient_checkpointing"] == "auto" and length == LENGTHS[0] else 2
        label = f"long, {settings}, {length} tokens"
        try:
            measured = measure(engine, device, batch, length, updates=updates, label=label)
        except StepOutOfMemory as e:
            logger.warning("%s: %s", label, e)
        del engine
        free(device)
    return measured
