"""The measurements `experts`, `experts_ep`, `experts_whole` and `push_experts` of `python -m tools.bench gpu`: updates
of a model with experts, and its weights on the way to a server.

`experts` and `experts_ep` compare stacked experts (mcore_adapter/models/experts/stacked.py) with TransformerEngine's
grouped layers and, on one GPU, with Megatron's own training loop, in one run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from mcore_adapter.models.bare_loop import Fused
from rollout.inference.gpus import query_gpus
from tools.bench.figure import Figure
from tools.bench.gpu.trainer import (
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
from tools.bench.gpu.widths import GB, Measured, WidthsScene, measure, mfu_rows, rows

logger = logging.getLogger(__name__)

LENGTH, SEQUENCES = 4096, 32
LIMIT_GB = 90
SLICE: dict[str, Any] = dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    hidden_act="silu",
    initializer_range=0.02,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    torch_dtype="bfloat16",
    eos_token_id=None,
    bos_token_id=None,
    use_sliding_window=False,
    attention_dropout=0.0,
    attention_bias=False,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=6,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=False,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
"""Qwen3-30B-A3B with 6 of its 48 layers."""
TRIED = {
    **SLICE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
"""Its shape where there is no GPU."""
FUSED: tuple[Fused, ...] = ("permutation", "routing", "weight_gradients")
"""Kernels of TransformerEngine in Megatron's own loop. With its cross entropy, the gradients are infinite."""


def experts(scene: Scene) -> Iterator[Figure]:
    """Yield PPO updates of 131,072 tokens in microbatches of 32,768 and 16,384. One GPU."""
    small = not query_gpus()
    ours = WidthsScene(folder=scene.folder, first_gpu=scene.first_gpu, raw=TRIED if small else SLICE)
    length, count, sizes = (32, 4, (64, 32)) if small else (LENGTH, SEQUENCES, (32768, 16384))
    grouped, stacked = (_measure(ours, length, count, sizes, stacked=way) for way in (False, True))
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
    settings: Mapping[str, Any] = MappingProxyType({"gradient_checkpointing": "selective"}),
) -> dict[int, Measured]:
    """Return the updates by the tokens of a microbatch."""
    with trainer_world() as (parallel, device):
        device.has_grouped_products = stacked
        batch = random_batch(scene, [length] * count)
        engine = make_engine(scene, parallel, device, **settings)
        label = f"experts, {settings['recompute']}, {'stacked' if stacked else 'grouped layers'}"
        measured = {
            size: measure(engine, device, batch, size, updates=WARM_UP + ROUNDS, label=f"{label}, {size}")
            for size in sizes
        }
        del engine
        free(device)
    return measured
