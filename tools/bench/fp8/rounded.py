"""The additions of learning.py without a GPU: the embedded generator samples from weights that were rounded to FP8.

The weights are those that an FP8 server would hold; products are in bfloat16, where a server would round activations
too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from mcore_adapter.hf.block_fp8 import dequantize, quantize_bucket
from mcore_adapter.settings import EngineSettings, OptimizerSettings
from model_specs.block_fp8 import SCALE, is_quantized
from rollout.inference.embedded.generator import EmbeddedGenerator
from rollout.types import WeightBucket
from tools.bench.cpu import Scene
from tools.bench.figure import Figure
from tools.bench.fp8.learning import Size, Sums, figures, mean_curve, warm_up
from tools.bench.gpu import Scene as Shaped
from tools.bench.gpu import trainer_world

SIZE = Size(steps=800, every=100, seeds=(1, 2, 3))
LEARNING_RATE = 2e-4


class Embedded:
    """See learning.Server."""

    def __init__(self, config: Mapping[str, Any], *, quantized: bool) -> None:
        self.generator = EmbeddedGenerator(config, max_running=512, dtype="bfloat16", threads=2)
        self._quantized = quantized

    async def push(self, engine: Any, version: int, *, verify: bool) -> None:
        """Copy the weights, rounded or as they are."""
        await self.generator.pause()
        for bucket in engine.iter_hf_weights(1 << 30):
            tensors = round_to_fp8(bucket) if self._quantized else bucket
            await self.generator.update_weights(WeightBucket(tensors=tensors))
        await self.generator.resume(version)


def round_to_fp8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in their own format, with the values that FP8 leaves of weights of linear layers."""
    held = quantize_bucket(tensors)
    return {
        name: dequantize(held[name], held[name + SCALE]).to(tensor.dtype) if is_quantized(name) else tensor
        for name, tensor in tensors.items()
    }


def rounded(scene: Scene) -> Iterator[Figure]:
    """Yield the held-out accuracy with rounded weights, with that of bfloat16 as baseline."""
    yield from asyncio.run(_measured(Shaped(folder=scene.folder, shape="sums")))


async def _measured(scene: Shaped) -> list[Figure]:
    from mcore_adapter.engine import MegatronEngine

    sums, model = Sums(), str(scene.model)
    config = json.loads((scene.model / "config.json").read_text(encoding="utf-8"))
    both = [Embedded(config, quantized=quantized) for quantized in (False, True)]
    with trainer_world() as (parallel, device):

        def engine_of(path: str, lr: float, **changes: Any) -> Any:
            settings = EngineSettings(hf_path=path, dtype="bfloat16", seed=1, **changes)
            optimizer = OptimizerSettings(lr=lr, total_steps=10_000, eps=1e-8, beta2=0.99)
            return MegatronEngine(parallel=parallel, device=device, settings=settings, optimizer=optimizer)

        warm = engine_of(model, 1e-3, init_from_scratch=True)
        await warm_up(warm, both[0], sums, SIZE)
        folder = str(scene.folder / "warm")
        warm.save_hf(folder, tokenizer_from=model)
        curves = [await mean_curve(partial(engine_of, folder, LEARNING_RATE), served, sums, SIZE) for served in both]
        for served in both:
            await served.generator.close()
    return list(figures("fp8.sums_rounded", curves, SIZE))
