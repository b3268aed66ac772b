"""Servers in bfloat16 and in FP8 beside the trainer: the push, its bytes, and tokens/s.

Both start at once on one GPU; what is measured runs in one of them at a time, with the other one idle.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from rollout.inference.backend import Quantization
from rollout.inference.gpus import query_gpus
from rollout.inference.sglang.generator import SGLangGenerator
from tools.bench.figure import Figure
from tools.bench.gpu import Scene, make_engine, trainer_world
from tools.bench.gpu_mismatch import difference, sampled
from tools.bench.gpu_push import Pushed, drive, push_once, sender
from tools.bench.gpu_servers import ask_plainly, generator, prompts, server_settings

logger = logging.getLogger(__name__)

PUSHES = 5
AT_ONCE = (64, 256, 512)
"""Requests of one round."""
SLOTS = max(AT_ONCE) * 5 // 4
"""Of a server on a GPU. It lets prompts wait until a tenth is free, and all of a round shall run at once."""
NEW_TOKENS, ROUNDS = 256, 3
WARM_UP_ROUNDS, AGREEMENT = 6, 0.05
"""Most rounds of warm-up, and the relative difference of two successive ones that ends it."""
BUCKET_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server, and the sender that pushes into it alone."""

    weight_format: Quantization
    generator: SGLangGenerator
    sender: Any

    async def push(self, engine: Any, version: int, *, verify: bool) -> Pushed:
        buckets = partial(engine.iter_hf_weights, BUCKET_BYTES)
        return await push_once([self.generator], self.sender, buckets, version, verify=verify)


def formats() -> tuple[Quantization, ...]:
    """Return what is compared; on the CPU, where this is a trial, there is no FP8."""
    return ("auto", "fp8_block") if query_gpus() else ("auto",)


def require_deep_gemm(scene: Scene) -> None:
    """Raise RuntimeError where FP8 servers would be measured with SGLang's Triton kernels, which are slower."""
    if query_gpus() and scene.sglang_python is None and find_spec("deep_gemm") is None:
        raise RuntimeError("FP8 servers need DeepGEMM: pip install sgl-deep-gemm==0.1.5.post1")


@asynccontextmanager
async def serving(scene: Scene, device: Any) -> AsyncIterator[list[Served]]:
    """Start a server of each format on the trainer's GPU, at once. Raises as require_deep_gemm()."""
    require_deep_gemm(scene)
    gpu = scene.first_gpu if query_gpus() else None
    on_gpu = {} if gpu is None else {
        "mem_fraction_static": 0.6, "max_total_tokens": max(AT_ONCE) * (NEW_TOKENS + 160),
        "cuda_graph_bs_decode": [16, *AT_ONCE],
    }  # fmt: skip
    async with AsyncExitStack() as stack:

        async def start(weight_format: Quantization) -> Served:
            settings = replace(
                server_settings(scene, gpu, colocated=True, **on_gpu),
                name=f"generator-{weight_format}",
                log_file=scene.folder / f"server-{weight_format}.log",
                weight_format=weight_format,
                max_running=SLOTS if gpu is not None else 8,
            )
            served = await stack.enter_async_context(generator(settings, "in_place"))
            sending = sender(scene, device, BUCKET_BYTES, beside=True, weight_format=weight_format)
            await asyncio.to_thread(sending.connect, [replace(served.endpoint, trainer_ranks=(0,))])
            return Served(weight_format=weight_format, generator=served, sender=sending)

        yield list(await asyncio.gather(*map(start, formats())))


def servers(scene: Scene) -> Iterator[Figure]:
    """Yield the figures of FP8 with those of bfloat16 as baselines. One GPU."""
    require_deep_gemm(scene)
    with trainer_world() as (parallel, device):
        engine = make_engine(scene, parallel, device, trains=False)
        yield from drive(_measured(scene, engine, device))


async def _measured(scene: Scene, engine: Any, device: Any) -> AsyncIterator[Figure]:
    start = time.perf_counter()
    async with serving(scene, device) as both:
        yield _figure(scene, "both_servers_start", "s", [time.perf_counter() - start])
        pushes = []
        for served in both:
            for version in (1, 2):
                await served.push(engine, version, verify=True)  # raises where a checksum or a format differs
            pushes.append([await served.push(engine, 3 + i, verify=False) for i in range(PUSHES)])
        yield _figure(scene, "push", "GB", [p[-1].gigabytes for p in pushes])
        for part in ("gather", "send"):
            seconds = [float(np.median([getattr(p, part) for p in of])) for of in pushes]
            yield _figure(scene, f"push_{part}", "ms", [1e3 * s for s in seconds])
        for at_once in AT_ONCE if query_gpus() else (4,):
            asked = [partial(_rate, scene, served.generator.endpoint.url, at_once) for served in both]
            await asyncio.gather(*(ask(0) for ask in asked))  # kernels of all servers compile at the same time
            rates = [
                await steady_rate(ask, f"{s.weight_format}, {at_once}") for s, ask in zip(both, asked, strict=True)
            ]
            yield _figure(scene, f"tokens_per_second_{at_once}_at_once", "tokens/s", rates)
        given = prompts(scene, 64 if query_gpus() else 2, seed=9)
        off = [difference(engine, await sampled(s.generator, 9, given, 128 if query_gpus() else 8)) for s in both]
        yield _figure(scene, "mismatch_random", "nats", off)


def _figure(scene: Scene, name: str, unit: str, values: Sequence[float], target: str = "") -> Figure:
    """Return a figure of the last format against the first, where there are two."""
    baseline = values[0] if len(values) > 1 else None
    return Figure(name=f"fp8.{scene.shape}_{name}", value=values[-1], unit=unit, baseline=baseline, target=target)


async def steady_rate(ask: Callable[[int], Awaitable[float]], label: str) -> float:
    """Return the median tokens/s of ROUNDS rounds after the warm-up. `ask` runs the round of a number.

    A kernel for a number of rows that no round had before is compiled when it is needed, which takes seconds. The
    warm-up ends when two successive rounds have about the same rate.
    """
    warm = [await ask(1)]
    while len(warm) < WARM_UP_ROUNDS:
        warm.append(await ask(len(warm) + 1))
        if abs(warm[-1] - warm[-2]) <= AGREEMENT * max(warm[-2:]):
            break
    rates = [await ask(len(warm) + 1 + i) for i in range(ROUNDS)]
    logger.info("tokens/s of %s at once: %s after %s", label, [round(r) for r in rates], [round(r) for r in warm])
    return float(np.median(rates))


async def _rate(scene: Scene, url: str, at_once: int, number: int) -> float:
    """Return tokens/s of so many requests that begin together. No other round has the same prompts."""
    sampling = {"max_new_tokens": NEW_TOKENS if query_gpus() else 8, "temperature": 1.0, "ignore_eos": True}
    bodies = [
        {"input_ids": prompt, "return_logprob": True, "sampling_params": sampling}
        for prompt in prompts(scene, at_once, seed=100 * at_once + number)
    ]
    start = time.perf_counter()
    lengths = await ask_plainly(url, bodies, at_once=at_once)
    return sum(lengths) / (time.perf_counter() - start)
