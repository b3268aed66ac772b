"""The measurement of `python -m tools.bench gpu --only experts`: updates of a model with experts.

Stacked experts (mcore_adapter/models/stacked_experts.py) against TransformerEngine's grouped layers, in one run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from model_specs.hf_config import parse_config
from rollout.inference.gpus import query_gpus
from tools.bench.figure import Figure
from tools.bench.gpu import (
    PEAK_FLOPS,
    Scene,
    free,
    make_engine,
    median_seconds,
    ppo_update,
    random_batch,
    trainer_world,
)

LENGTH, SEQUENCES = 4096, 32
LIMIT_GB = 90
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


@dataclass(frozen=True, kw_only=True)
class ExpertScene(Scene):
    """A Scene whose model is the slice."""

    raw: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.raw["vocab_size"])

    @property
    def model(self) -> Path:
        path = self.folder / "experts"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.raw))
        return path

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of forward and backward of a causal sequence, without the embedding look-up; of experts, the
        chosen ones."""
        config = parse_config(self.raw)
        moe = config.moe
        assert moe is not None, "a model with experts"
        hidden, width = config.hidden_size, config.num_heads * config.head_dim
        attention = hidden * (2 * width + 2 * config.num_kv_heads * config.head_dim)
        experts = hidden * (moe.num_experts + 3 * moe.top_k * moe.intermediate_size)
        matrices = config.num_layers * (attention + experts) + config.vocab_size * hidden
        return 6 * matrices + 6 * config.num_layers * width * length


def experts(scene: Scene) -> Iterator[Figure]:
    """Yield PPO updates of 131,072 tokens in microbatches of 32,768 and 16,384. One GPU."""
    small = not query_gpus()
    ours = ExpertScene(folder=scene.folder, first_gpu=scene.first_gpu, raw=TRIED if small else SLICE)
    length, count, sizes = (32, 4, (64, 32)) if small else (LENGTH, SEQUENCES, (32768, 16384))
    results = {stacked: _measure(ours, length, count, sizes, stacked=stacked) for stacked in (False, True)}
    for size in sizes:
        (bare, bare_peak), (rate, peak) = results[False][size], results[True][size]
        name = f"update.experts_{size}"
        yield Figure(name=f"{name}_tokens_per_second", value=rate, unit="tokens/s", baseline=bare, target="")
        mfu, bare_mfu = (100 * r * ours.flops_per_token(length) / PEAK_FLOPS for r in (rate, bare))
        target = ">= 38, aim 45" if size == max(sizes) else ">= 30"
        yield Figure(name=f"{name}_mfu", value=mfu, unit="%", baseline=bare_mfu, target=target)
        yield Figure(name=f"memory.experts_{size}", value=peak, unit="GB", baseline=bare_peak, target="")
    yield from within_limit(ours, length, count, sizes, results[True])


def within_limit(
    scene: ExpertScene, length: int, count: int, sizes: tuple[int, ...], kept: dict[int, tuple[float, float]]
) -> Iterator[Figure]:
    """Yield the same updates with the least recomputation that fits into LIMIT_GB, against those that keep more."""
    settings = {"recompute": "auto", "recompute_limit_gib": LIMIT_GB * 1e9 / 2**30}
    measured = _measure(scene, length, count, sizes, stacked=True, settings=settings)
    for size in sizes:
        (bare, bare_peak), (rate, peak) = kept[size], measured[size]
        name = f"experts_{size}_auto"
        yield Figure(name=f"update.{name}_tokens_per_second", value=rate, unit="tokens/s", baseline=bare, target="")
        mfu, bare_mfu = (100 * r * scene.flops_per_token(length) / PEAK_FLOPS for r in (rate, bare))
        yield Figure(name=f"update.{name}_mfu", value=mfu, unit="%", baseline=bare_mfu, target="")
        yield Figure(name=f"memory.{name}", value=peak, unit="GB", baseline=bare_peak, target=f"<= {LIMIT_GB}")


def _measure(
    scene: Scene,
    length: int,
    count: int,
    sizes: tuple[int, ...],
    *,
    stacked: bool,
    settings: Mapping[str, Any] = MappingProxyType({"recompute": "selective"}),
) -> dict[int, tuple[float, float]]:
    """Return tokens of a microbatch -> (tokens/s, peak GB)."""
    with trainer_world() as (parallel, device):
        device.has_grouped_products = stacked
        batch = random_batch(scene, [length] * count)
        measured = _updates(make_engine(scene, parallel, device, **settings), device, batch, sizes)
        free(device)
    return measured


def _updates(engine: Any, device: Any, batch: Any, sizes: tuple[int, ...]) -> dict[int, tuple[float, float]]:
    measured: dict[int, tuple[float, float]] = {}
    for size in sizes:
        device.forget_peak()
        seconds = median_seconds(device, partial(ppo_update, engine, batch, size))
        measured[size] = batch.num_tokens / seconds, device.memory_stats()["peak_gib"] * 2**30 / 1e9
    return measured
