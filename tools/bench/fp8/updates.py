"""Updates whose matrix products are in FP8, by recipe, beside those in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mcore_adapter.settings import Fp8Recipe
from rollout.inference.gpus import query_gpus
from tools.bench.figure import Figure
from tools.bench.gpu import Scene, free, random_batch, trainer_world, update_rate

RECIPES: tuple[Fp8Recipe, ...] = ("tensorwise", "blockwise")


def updates(scene: Scene) -> Iterator[Figure]:
    """Yield tokens/s and memory of PPO updates on 32,768 tokens; of 7B the 12 layers that one GPU trains."""
    scene = replace(scene, shape="7B_12_layers") if scene.shape == "7B" else scene
    on_gpu = bool(query_gpus())
    lens, tokens_per_mb = ([2048] * 16, 16384) if on_gpu else ([64] * 4, 128)
    measured: dict[Fp8Recipe | None, tuple[float, float]] = {}
    for recipe in (None, *RECIPES) if on_gpu else (None,):
        with trainer_world() as (parallel, device):
            batch = random_batch(scene, lens)
            measured[recipe] = update_rate(scene, parallel, device, batch, tokens_per_mb, fp8=recipe)
            free(device)
        rate, peak = measured[recipe]
        plain_rate, plain_peak = measured[None] if recipe else (None, None)
        name = f"fp8.{scene.shape}_update_{recipe or 'bfloat16'}"
        yield Figure(name=f"{name}", value=rate, unit="tokens/s", baseline=plain_rate, target="")
        yield Figure(name=f"{name}_memory", value=peak, unit="GB", baseline=plain_peak, target="")
