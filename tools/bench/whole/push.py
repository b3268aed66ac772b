"""Weight updates of Qwen3-30B-A3B from expert-parallel ranks into servers on the same GPUs, without a run around them:
all layers on four GPUs, a slice of them on two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace

from core.weight_sync.servers import with_colocated_ranks
from rollout.inference.gpus import query_gpus
from rollout.inference.sglang.generator import SGLangGenerator
from tools.bench.figure import Figure
from tools.bench.gpu import Scene
from tools.bench.gpu_memory import WidthsScene
from tools.bench.gpu_push import PUSHES, drive, push_figures, push_once
from tools.bench.gpu_ranks import Sending, TrainerRanks, sending_rank
from tools.bench.gpu_servers import generator, server_settings
from tools.bench.whole.size import Size, scene_of, shared_size_for, size_of_host

BUCKETS_MIB = (1024, 4096)
_ON_GPUS = {
    "mem_fraction_static": 0.4, "max_total_tokens": 65536, "cuda_graph_bs_decode": [8],
    "enforce_disable_flashinfer_allreduce_fusion": True,
}  # fmt: skip
"""Of servers that sample nothing here."""


def push(scene: Scene) -> Iterator[Figure]:
    """Yield pushes by bucket size."""
    size = size_of_host(shared_size_for)
    yield from drive(_push(replace(scene_of(scene, size, "push"), profile=scene.profile), size))


async def _push(scene: WidthsScene, size: Size) -> AsyncIterator[Figure]:
    placed = size.placed
    async with AsyncExitStack() as stack:
        served = await _servers(scene, size, stack)
        endpoints = with_colocated_ranks(
            [one.endpoint for one in served], placed.generator.replicas, placed.trainer
        )  # fmt: skip
        trainer = placed.trainer.layout
        sending = Sending(allocation=placed, layout={"dp": trainer.dp, "ep": trainer.ep})
        ranks = TrainerRanks(scene, sending_rank, sending, num_ranks=trainer.world_size)
        try:
            version = 0
            for mib in BUCKETS_MIB:
                await asyncio.to_thread(ranks.connect, endpoints, mib << 20)
                pushes = []
                for count in range(2 + PUSHES):
                    version += 1
                    pushes.append(await push_once(served, ranks, lambda: None, version, verify=count < 2))
                name = f"push.30B_A3B_{size.layers}_layers_ep{trainer.ep}_colocated_{mib}mib"
                for figure in push_figures(name, pushes[2:], None, "<= 500"):
                    yield figure
                await asyncio.to_thread(ranks.close)
        finally:
            ranks.kill()


async def _servers(scene: WidthsScene, size: Size, stack: AsyncExitStack) -> list[SGLangGenerator]:
    """Return the servers, on the GPUs of their slots or on the CPU."""
    generators, on_gpus = size.placed.generator, bool(query_gpus())
    any_gpu = scene.first_gpu if on_gpus else None
    settings = [
        replace(
            server_settings(scene, any_gpu, colocated=True, **(_ON_GPUS if on_gpus else {})),
            name=f"generator-{i}",
            log_file=scene.folder / f"server-{i}.log",
            gpus=tuple(scene.first_gpu + slot.gpu for slot in slots) if on_gpus else (),
            tp=generators.layout.tp,
            max_running=16,
        )
        for i, slots in enumerate(generators.replicas)
    ]
    return await asyncio.gather(*(stack.enter_async_context(generator(one, "abort")) for one in settings))
