"""The measurement of `python -m tools.bench gpu --only long`: updates on long sequences.

The least recomputation that fits (recompute="auto") against that of full layers, in one run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_adapter.out_of_memory import StepOutOfMemory
from model_specs.hf_config import parse_config
from rollout.inference.gpus import query_gpus
from tools.bench.figure import Figure
from tools.bench.gpu import PEAK_FLOPS, Scene, free, make_engine, ppo_update, random_batch, seconds_of, trainer_world

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

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LongScene(Scene):
    """A Scene whose model has these widths."""

    raw: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.raw["vocab_size"])

    @property
    def model(self) -> Path:
        path = self.folder / "long"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.raw))
        return path

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of forward and backward of a causal sequence, without the embedding look-up."""
        config = parse_config(self.raw)
        hidden, width = config.hidden_size, config.num_heads * config.head_dim
        layer = hidden * (2 * width + 2 * config.num_kv_heads * config.head_dim + 3 * config.intermediate_size)
        matrices = config.num_layers * layer + config.vocab_size * hidden
        return 6 * matrices + 6 * config.num_layers * width * length


def long(scene: Scene) -> Iterator[Figure]:
    """Yield PPO updates on one sequence of 65,536 and of 131,072 tokens, a microbatch each. One GPU."""
    small = not query_gpus()
    ours = LongScene(folder=scene.folder, first_gpu=scene.first_gpu, raw=TRIED if small else WIDTHS)
    lengths = (64, 128) if small else LENGTHS
    results = {"full": _measure(ours, lengths[:1], "full"), "auto": _measure(ours, lengths, "auto")}
    for length in lengths:
        name = f"long.{NAME}_{length}"
        if length not in results["auto"]:
            continue  # it did not fit, as the log says
        rate, peak = results["auto"][length]
        bare, bare_peak = results["full"].get(length, (None, None))
        mfu, bare_mfu = (r and 100 * r * ours.flops_per_token(length) / PEAK_FLOPS for r in (rate, bare))
        target = ">= 45" if length == lengths[0] else "fits"
        yield Figure(name=f"{name}_tokens_per_second", value=rate, unit="tokens/s", baseline=bare, target="")
        yield Figure(name=f"{name}_mfu", value=mfu or 0.0, unit="%", baseline=bare_mfu, target=target)
        yield Figure(name=f"memory.{name}", value=peak, unit="GB", baseline=bare_peak, target="")


def _measure(scene: LongScene, lengths: tuple[int, ...], recompute: str) -> dict[int, tuple[float, float]]:
    """Return length -> (tokens/s, peak GB) of the last of a few updates: the first of a length take memory, and correct
    the choice."""
    measured: dict[int, tuple[float, float]] = {}
    with trainer_world() as (parallel, device):
        engine = make_engine(scene, parallel, device, recompute=recompute)
        ppo_update(engine, random_batch(scene, [lengths[0] // 16]), lengths[0])  # kernels and moments
        for length in lengths:
            batch = random_batch(scene, [length])
            try:
                seconds = _seconds(
                    engine, device, batch, length, 2 if length > lengths[0] or recompute == "full" else 3
                )
            except StepOutOfMemory as e:
                logger.warning("%s, %d tokens: %s", recompute, length, e)
                break
            measured[length] = length / seconds, device.memory_stats()["peak_gib"] * 2**30 / 1e9
        del engine
        free(device)
    return measured


def _seconds(engine: Any, device: Any, batch: Any, length: int, updates: int) -> float:
    for number in range(updates):
        device.forget_peak()
        seconds = seconds_of(device, lambda: ppo_update(engine, batch, length))
        stats = device.memory_stats()
        logger.info(
            "%d tokens, update %d: %.2f s, peak %.1f GB, %d times out of cache", length, number, seconds,
            stats["peak_gib"] * 2**30 / 1e9, stats["allocator_retries"],
        )  # fmt: skip
    return seconds
