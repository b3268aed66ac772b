"""The measurements `long` and `long_cp` of `python -m tools.bench gpu`: updates on long sequences.

The least recomputation that fits (recompute="auto") against that of full layers, in one run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from mcore_adapter.out_of_memory import StepOutOfMemory
from rollout.inference.gpus import query_gpus
from tools.bench.figure import Figure
from tools.bench.gpu import PEAK_FLOPS, Scene, config_of, free, make_engine, ppo_update, random_batch, trainer_world
from tools.bench.gpu_memory import Measured, WidthsScene, measure, mfu_rows, rows
from tools.bench.gpu_ranks import RANKS, Updates, measure_updates

LENGTHS = (65536, 131072)
WIDTHS: dict[str, Any] = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_act="silu", initializer_range=0.02,
    max_position_embeddings=131072, rms_norm_eps=1e-6, rope_theta=1000000.0, torch_dtype="bfloat16",
    eos_token_id=None, bos_token_id=None, use_sliding_window=False, attention_dropout=0.0, attention_bias=False,
    hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip
"""Qwen3-4B."""
TRIED = {
    **WIDTHS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
}  # fmt: skip
"""Its shape where there is no GPU."""
NAME = "4B"
CP_LENGTH, CP_SEQUENCES, CP_SHAPE = 32768, 2, "7B"
"""Of the measurement with two context-parallel ranks."""

logger = logging.getLogger(__name__)


def long(scene: Scene) -> Iterator[Figure]:
    """Yield PPO updates on one sequence of 65,536 and of 131,072 tokens, a microbatch each. One GPU."""
    small = not query_gpus()
    ours = WidthsScene(folder=scene.folder, first_gpu=scene.first_gpu, raw=TRIED if small else WIDTHS)
    lengths = (64, 128) if small else LENGTHS
    whole, auto = _measure(ours, lengths[:1], "full"), _measure(ours, lengths, "auto")
    for length in lengths:
        if length not in auto:
            continue  # it did not fit; the log has the error
        name, bare = f"long.{NAME}_{length}", whole.get(length)
        yield from mfu_rows(
            name, auto[length], bare, flops_per_token=ours.flops_per_token(length), peak_flops=PEAK_FLOPS,
            target=">= 45" if length == lengths[0] else "fits",
        )  # fmt: skip
        yield from rows(name, auto[length], bare, target="")


def long_cp(scene: Scene) -> Iterator[Figure]:
    """Yield PPO updates of 7B on two sequences of 32,768 tokens over two context-parallel ranks, a microbatch each;
    MFU of both together. Two GPUs."""
    small = not query_gpus()
    raw = TRIED if small else config_of(CP_SHAPE)
    ours = WidthsScene(folder=scene.folder, first_gpu=scene.first_gpu, raw=raw)
    length = 64 if small else CP_LENGTH

    def measured(recompute: str) -> Measured:
        updates = Updates(
            layout={"cp": RANKS}, lens=[length] * CP_SEQUENCES, sizes=[length], count=4, label=recompute,
            settings={"recompute": recompute},
        )  # fmt: skip
        return measure_updates(ours, updates)[length]

    whole, auto = measured("full"), measured("auto")
    name = f"long.{CP_SHAPE}_cp{RANKS}_{length}"
    yield from mfu_rows(
        name, auto, whole, flops_per_token=ours.flops_per_token(length), peak_flops=RANKS * PEAK_FLOPS, target=">= 45"
    )
    yield from rows(name, auto, whole, target="fits")


def _measure(scene: WidthsScene, lengths: tuple[int, ...], recompute: str) -> dict[int, Measured]:
    """Return the updates by length."""
    measured: dict[int, Measured] = {}
    with trainer_world() as (parallel, device):
        engine = make_engine(scene, parallel, device, recompute=recompute)
        ppo_update(engine, random_batch(scene, [lengths[0] // 16]), lengths[0])  # kernels and moments
        for length in lengths:
            batch = random_batch(scene, [length])
            updates = 3 if recompute == "auto" and length == lengths[0] else 2
            label = f"{recompute}, {length} tokens"
            try:
                measured[length] = measure(engine, device, batch, length, updates=updates, label=label)
            except StepOutOfMemory as e:
                logger.warning("%s: %s", label, e)
                break
        del engine
        free(device)
    return measured
