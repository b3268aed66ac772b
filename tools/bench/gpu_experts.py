"""The measurements `experts`, `experts_ep` and `experts_whole` of `python -m tools.bench gpu`: updates of a model with
experts.

`experts` and `experts_ep` compare stacked experts (mcore_adapter/models/experts/stacked.py) with TransformerEngine's
grouped layers and, on one GPU, with Megatron's own training loop, in one run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mcore_adapter.bare_loop import Fused
from rollout.inference.gpus import query_gpus
from tools.bench.figure import Figure
from tools.bench.gpu import (
    PEAK_FLOPS,
    ROUNDS,
    WARM_UP,
    Scene,
    fastest_bare_rate,
    free,
    make_engine,
    random_batch,
    trainer_world,
)
from tools.bench.gpu_memory import GB, Measured, WidthsScene, measure, mfu_rows, rows
from tools.bench.gpu_ranks import RANKS, Updates, measure_routings, measure_updates

logger = logging.getLogger(__name__)

LENGTH, SEQUENCES = 4096, 32
LIMIT_GB = 90
EP_LAYERS, EP_LIMIT_GB, EP_UPDATES = 12, 110, 5
"""Of the measurement with two expert-parallel ranks."""
WHOLE_RANKS, WHOLE_SEQUENCES, WHOLE_LAYERS, WHOLE_PATIENCE_SECONDS = 4, 16, 48, 400.0
"""Of the measurement with all layers."""
SLICE: dict[str, Any] = dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_act="silu", initializer_range=0.02,
    max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000.0, torch_dtype="bfloat16",
    eos_token_id=None, bos_token_id=None, use_sliding_window=False, attention_dropout=0.0, attention_bias=False,
    hidden_size=2048, intermediate_size=6144, num_hidden_layers=6, num_attention_heads=32, num_key_value_heads=4,
    head_dim=128, vocab_size=151936, tie_word_embeddings=False, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip
"""Qwen3-30B-A3B with 6 of its 48 layers."""
TRIED = {
    **SLICE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
"""Its shape where there is no GPU."""
FUSED: tuple[Fused, ...] = ("permutation", "routing", "weight_gradients")
"""What TransformerEngine computes in Megatron's own loop. With its cross entropy, the gradients are infinite."""


def experts(scene: Scene) -> Iterator[Figure]:
    """Yield PPO updates of 131,072 tokens in microbatches of 32,768 and 16,384. One GPU."""
    small = not query_gpus()
    ours = WidthsScene(
        folder=scene.folder, first_gpu=scene.first_gpu, profile=scene.profile, raw=TRIED if small else SLICE
    )
    length, count, sizes = (32, 4, (64, 32)) if small else (LENGTH, SEQUENCES, (32768, 16384))
    grouped, stacked = (_measure(ours, length, count, sizes, stacked=way) for way in (False, True))
    flops = ours.flops_per_token(length)

    def compared(
        name: str, size: int, value: Mapping[int, Measured], baseline: Mapping[int, Measured], target: str
    ) -> Iterator[Figure]:
        yield from mfu_rows(
            f"update.{name}", value[size], baseline[size], flops_per_token=flops, peak_flops=PEAK_FLOPS,
            target=">= 38, aim 45" if size == max(sizes) else ">= 30",
        )  # fmt: skip
        yield from rows(name, value[size], baseline[size], target=target)

    for size in sizes:
        yield from compared(f"experts_{size}", size, stacked, grouped, "")
    # The least recomputation that fits into LIMIT_GB, against selective recomputation.
    settings = {"recompute": "auto", "recompute_limit_gib": LIMIT_GB * 1e9 / 2**30}
    within = _measure(ours, length, count, sizes, stacked=True, settings=settings)
    for size in sizes:
        yield from compared(f"experts_{size}_auto", size, within, stacked, f"<= {LIMIT_GB}")
    for size in sizes:
        if (found := _megatron(ours, length, count, size, () if small else FUSED)) is not None:
            rate, peak = found
            label, value = f"update.experts_{size}_megatron", stacked[size].tokens_per_second
            yield Figure(name=f"{label}_tokens_per_second", value=value, unit="tokens/s", baseline=rate, target="")
            value = stacked[size].peak / GB
            yield Figure(name=f"memory.experts_{size}_megatron", value=value, unit="GB", baseline=peak, target="")


def experts_ep(scene: Scene) -> Iterator[Figure]:
    """Yield updates of 12 layers over two expert-parallel ranks, 131,072 tokens each; MFU of both together. Two
    GPUs."""
    small = not query_gpus()
    raw = TRIED if small else {**SLICE, "num_hidden_layers": EP_LAYERS}
    ours = WidthsScene(folder=scene.folder, first_gpu=scene.first_gpu, profile=scene.profile, raw=raw)
    length, count, sizes = (32, 8, (64, 32)) if small else (LENGTH, RANKS * SEQUENCES, (32768, 16384))
    flops = ours.flops_per_token(length)

    def measured(label: str, *, stacked: bool, **settings: Any) -> dict[int, Measured]:
        updates = Updates(
            layout={"dp": RANKS, "ep": RANKS}, batches={size: [length] * count for size in sizes}, count=EP_UPDATES,
            label=f"experts_ep, {label}", settings=settings, stacked=stacked,
        )  # fmt: skip
        return measure_updates(ours, updates)

    grouped = measured("grouped layers", stacked=False, recompute="selective")
    within = {"recompute": "auto", "recompute_limit_gib": EP_LIMIT_GB * 1e9 / 2**30}
    choices: dict[str, dict[str, Any]] = {"": {"recompute": "selective"}, "_auto": within}
    for suffix, settings in choices.items():
        stacked = measured(f"stacked{suffix}", stacked=True, **settings)
        for size in sizes:
            name = f"experts_ep{RANKS}_{size}{suffix}"
            yield from mfu_rows(
                f"update.{name}", stacked[size], grouped[size], flops_per_token=flops, peak_flops=RANKS * PEAK_FLOPS,
                target=">= 35",
            )  # fmt: skip
            yield from rows(name, stacked[size], grouped[size], target=f"<= {EP_LIMIT_GB}")


def experts_whole(scene: Scene) -> Iterator[Figure]:
    """Yield updates of all 48 layers over four expert-parallel ranks, 65,536 tokens each, with masters and moments in
    378 GB of host memory: with balanced experts, and as the router chooses. MFU of all together. Four GPUs."""
    small = not query_gpus()
    raw = TRIED if small else {**SLICE, "num_hidden_layers": WHOLE_LAYERS}
    ours = WidthsScene(folder=scene.folder, first_gpu=scene.first_gpu, profile=scene.profile, raw=raw)
    length, count, size = (32, 8, 64) if small else (LENGTH, WHOLE_RANKS * WHOLE_SEQUENCES, 16384)
    flops = ours.flops_per_token(length)
    routings = {"experts_whole_balanced": True, "experts_whole": False}
    updates = Updates(
        layout={"dp": WHOLE_RANKS, "ep": WHOLE_RANKS}, batches={size: [length] * count}, count=EP_UPDATES,
        label="experts_whole", balanced=tuple(routings.values()), patience_seconds=WHOLE_PATIENCE_SECONDS,
        settings={"recompute": "auto", "optimizer": {"offload": not small}},
    )  # fmt: skip
    for (name, balanced), found in zip(routings.items(), measure_routings(ours, updates), strict=True):
        for row in mfu_rows(
            f"update.{name}", found[size], None, flops_per_token=flops, peak_flops=WHOLE_RANKS * PEAK_FLOPS, target=""
        ):
            yield replace(row, target=">= 20,000" if row.unit == "tokens/s" and not balanced else "")
        yield from rows(name, found[size], None, target="<= 141")


def _megatron(
    scene: WidthsScene, length: int, count: int, size: int, fused: tuple[Fused, ...]
) -> tuple[float, float] | None:
    """Return (tokens/s, peak GB) of Megatron's own loop, with fused kernels or without, whichever is faster; None if
    both ran out of memory."""
    with trainer_world() as (parallel, device):
        device.has_grouped_products = False
        batch = random_batch(scene, [length] * count)
        choices = [fused, ()] if fused else [()]
        return fastest_bare_rate(scene, parallel, device, batch, size, choices=choices, of=min)


def _measure(
    scene: WidthsScene,
    length: int,
    count: int,
    sizes: tuple[int, ...],
    *,
    stacked: bool,
    settings: Mapping[str, Any] = MappingProxyType({"recompute": "selective"}),
) -> dict[int, Measured]:
    """Return the updates by the tokens of a microbatch."""
    with trainer_world() as (parallel, device):
        device.has_grouped_products = stacked
        batch = random_batch(scene, [length] * count)
        engine = make_engine(scene, parallel, device, **settings)
        label = f"experts, {settings['recompute']}, {'stacked' if stacked else 'grouped layers'}"
        measured = {
            size: measure(
                engine, device, batch, size, updates=WARM_UP + ROUNDS, label=f"{label}, {size}", profile=scene.profile
            )
            for size in sizes
        }
        del engine
        free(device)
    return measured
