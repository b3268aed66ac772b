"""The measurements `long` and `long_cp` of `python -m tools.bench gpu`: updates on long sequences.

The least recomputation that fits (gradient_checkpointing="auto") against that of full layers, in one run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from mcore_adapter.memory.out_of_memory import StepOutOfMemory
from rollout.inference.gpus import query_gpus
from tools.bench.figure import Figure
from tools.bench.gpu.trainer import PEAK_FLOPS, Scene, free, make_engine, ppo_update, random_batch, trainer_world
from tools.bench.gpu.widths import Measured, WidthsScene, measure, mfu_rows, rows

LENGTHS = (65536, 131072)
WIDTHS: dict[str, Any] = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    hidden_act="silu",
    initializer_range=0.02,
    max_position_embeddings=131072,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    torch_dtype="bfloat16",
    eos_token_id=None,
    bos_token_id=None,
    use_sliding_window=False,
    attention_dropout=0.0,
    attention_bias=False,
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=True,
)
"""Qwen3-4B."""
TRIED = {
    **WIDTHS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
"""Its shape where there is no GPU."""
NAME = "4B"
logger = logging.getLogger(__name__)


def long(scene: Scene) -> Iterator[Figure]:
    """Yield PPO updates on one sequence of 65,536 tokens, against recomputation of all layers as a whole, and on one of
    131,072 tokens, against the same without host memory for activations. A microbatch each. One GPU."""
    small = not query_gpus()
    ours = WidthsScene(folder=scene.folder, first_gpu=scene.first_gpu, raw=TRIED if small else WIDTHS)
    lengths = (64, 128) if small else LENGTHS
    baselines: tuple[dict[str, Any], ...] = (
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": "auto", "gradient_checkpointing_host_gib": 0.0},
    )
    for length, baseline, target in zip(lengths, baselines, (">= 45", "fits"), strict=True):
        if (auto := _measure(ours, length, gradient_checkpointing="auto")) is None:
            return  # it did not fit; the log has the error
        bare = _measure(ours, length, **baseline)
        name, flops = f"long.{NAME}_{length}", ours.flops_per_token(length)
        yield from mfu_rows(name, auto, bare, flops_per_token=flops, peak_flops=PEAK_FLOPS, target=target)
        yield from rows(name, auto, bare, target="")


def _measure(scene: WidthsScene, length: int, **settings: Any) -> Measured | None:
    """Return the updates on one sequence, by an engine of their own; None where they do not fit."""
    measured: Measured | None = None
    with trainer_world() as (parallel, device):
        engine = make_engine(scene, parallel, device, **settings)
        ppo_update(engine, random_batch(scene, [length // 16]), length)  # kernels and moments
        batch = random_batch(scene, [length])
        updates = 3 if settings["gradient_checkpointing"] == "auto" and length == LENGTHS[0] else 2
        label = f"long, {settings}, {length} tokens"
        try:
            measured = measure(engine, device, batch, length, updates=updates, label=label)
        except StepOutOfMemory as e:
            logger.warning("%s: %s", label, e)
        del engine
        free(device)
    return measured
