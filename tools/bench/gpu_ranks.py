"""The measurements of `python -m tools.bench gpu` with several trainer ranks, each a process of its own."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import queue
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from allocation import Allocation, ParallelLayout, parse
from core.config.push import choose_transport
from core.weight_sync.servers import SenderPlan, make_sender
from mcore_adapter.device import get_device
from rollout.inference.gpus import query_gpus
from rollout.inference.sglang.generator import SGLangGenerator
from tools.bench.figure import Figure
from tools.bench.gpu import Scene, become_rank, make_engine, median_seconds, ppo_update, random_batch
from tools.bench.gpu_memory import Measured, measure, with_balanced_experts
from tools.bench.gpu_push import drive, push_figures, pushes_into_streams, recorded
from tools.bench.gpu_servers import generator, server_settings

RANKS = 2
BUCKET_BYTES = 4 << 30
_PATIENCE_SECONDS = 240.0


def push(scene: Scene) -> Iterator[Figure]:
    """Yield pushes of two trainer ranks (TP2) into two servers. Four GPUs; give --shape 7B."""
    yield from drive(_push(scene))


async def _push(scene: Scene) -> AsyncIterator[Figure]:
    async with AsyncExitStack() as stack:
        served = await _servers(scene, 2, stack)
        for figure in await _figures(scene, served, f"push.{scene.shape}_tp2_to_2_servers", 0, tp=RANKS):
            yield figure


async def _servers(scene: Scene, count: int, stack: AsyncExitStack) -> list[SGLangGenerator]:
    """Return servers behind the ranks' GPUs, or on the CPU."""
    gpus = (scene.server_gpus[1 : 1 + count] if query_gpus() else []) or [None] * count
    settings = [
        replace(server_settings(scene, gpu), name=f"generator-{i}", log_file=scene.folder / f"server-{i}.log")
        for i, gpu in enumerate(gpus)
    ]
    return await asyncio.gather(*(stack.enter_async_context(generator(one)) for one in settings))


async def _figures(scene: Scene, served: list[SGLangGenerator], name: str, version: int, **layout: int) -> list[Figure]:
    """Push from ranks of this layout while every server streams; `version` is the last one pushed."""
    apart = parse("sglang.d2m1p1+d1m2p1", n_nodes=1, n_gpus_per_node=4)
    ranks = TrainerRanks(scene, sending_rank, Sending(allocation=apart, layout=layout))
    try:
        await asyncio.to_thread(ranks.connect, [one.endpoint for one in served], BUCKET_BYTES)
        pushes, gaps = await pushes_into_streams(scene, served, ranks, lambda: None, version)
        await asyncio.to_thread(ranks.close)
    finally:
        ranks.kill()
    return push_figures(name, pushes, gaps, "<= 60")


def overlap(scene: Scene) -> Iterator[Figure]:
    """Yield updates of two data-parallel ranks whose communication runs beside the computation, and after it. Two
    GPUs."""
    rates: dict[bool, float] = {}
    for overlapped in (True, False):
        ranks = TrainerRanks(scene, _data_parallel_rank, overlapped)
        try:
            rates[overlapped], norm = ranks.results()[0]
        finally:
            ranks.kill()
        name = "overlapped" if overlapped else "one_after_the_other"
        yield Figure(name=f"update.{scene.shape}_dp2_{name}_grad_norm", value=norm, unit="", baseline=None, target="")
    yield Figure(
        name=f"update.{scene.shape}_dp2_tokens_per_second", value=rates[True], unit="tokens/s", baseline=rates[False],
        target="",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Updates:
    """Updates of some ranks to measure, with one engine."""

    layout: Mapping[str, int]
    batches: Mapping[int, Sequence[int]]
    """Lengths of the sequences by the tokens of a microbatch, one batch after the other."""
    count: int
    """Of each batch."""
    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    stacked: bool = True
    """Experts are stacked where the device can; False: TransformerEngine's grouped layers."""
    balanced: tuple[bool, ...] = (False,)
    """Routings, one after the other. True: every expert gets as many tokens, whatever the router chooses."""
    patience_seconds: float = _PATIENCE_SECONDS
    """For all updates of a routing, and for what is built before them."""


def measure_updates(scene: Scene, updates: Updates) -> dict[int, Measured]:
    """Return the updates of the only routing, as measure_routings yields them."""
    (found,) = measure_routings(scene, updates)
    return found


def measure_routings(scene: Scene, updates: Updates) -> Iterator[dict[int, Measured]]:
    """Yield the updates of each routing when they are there, by the tokens of a microbatch: the rate of all ranks
    together, memory of the rank that has the largest peak. Raises RuntimeError when a rank ends."""
    num_ranks = ParallelLayout(**updates.layout).world_size
    ranks = TrainerRanks(scene, _updating_rank, updates, num_ranks=num_ranks)
    try:
        for _ in updates.balanced:
            # Updates are collective: no rank ends those of the next routing before all have put these.
            found = ranks.results(updates.patience_seconds)
            yield {
                size: replace(
                    max((of_rank[size] for of_rank in found.values()), key=lambda one: one.peak),
                    tokens_per_second=min(of_rank[size].tokens_per_second for of_rank in found.values()),
                )
                for size in updates.batches
            }
    finally:
        ranks.kill()


def _updating_rank(rank: int, port: int, scene: Scene, _: Any, results: Any, updates: Updates) -> None:
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {rank} %(message)s")
    with _joined(rank, port, scene, **updates.layout) as (parallel, device):
        if not updates.stacked:
            device.has_grouped_products = False
        engine = make_engine(scene, parallel, device, **updates.settings)
        for balanced in updates.balanced:
            measured = {}
            for size, lens in updates.batches.items():
                batch, label = random_batch(scene, lens), f"{updates.label}, {size}"
                if balanced:
                    batch, label = with_balanced_experts(batch, engine.model_config), f"{label}, balanced"
                measured[size] = measure(
                    engine, device, batch, size, updates=updates.count, label=label, profile=scene.profile
                )
            results.put((rank, measured))
        engine.logprobs(batch, max_tokens_per_mb=size)  # no rank leaves while another one communicates


class TrainerRanks:
    """Processes that run `function(rank, port, scene, tasks, results, *args)`; with sending_rank one sender."""

    def __init__(self, scene: Scene, function: Callable[..., None], *args: Any, num_ranks: int = RANKS) -> None:
        scene.model  # noqa: B018 (written before the ranks look for it)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._tasks: list[Any] = [context.Queue() for _ in range(num_ranks)]
        self._results: Any = context.Queue()
        self._processes = [
            context.Process(
                target=function, args=(rank, port, scene, self._tasks[rank], self._results, *args), daemon=True
            )
            for rank in range(num_ranks)
        ]
        for process in self._processes:
            process.start()

    def connect(self, servers: Sequence[Any], bucket_bytes: int) -> None:
        self._call("connect", servers, bucket_bytes)

    def prepare(self, _: None, *, verify: bool) -> None:
        """Do nothing: the ranks make the buckets themselves."""
        self._call("prepare", verify)

    def send(self) -> Any:
        """Return the report of the first rank."""
        return self._call("send")[0]

    def close(self) -> None:
        self._call("close")

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _call(self, name: str, *args: Any) -> dict[int, Any]:
        for tasks in self._tasks:
            tasks.put((name, args))
        return self.results()

    def results(self, patience_seconds: float = _PATIENCE_SECONDS) -> dict[int, Any]:
        """Return one result of each rank. Raises RuntimeError when a rank has ended without, or all take too long."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + patience_seconds
        while len(found) < len(self._processes):
            ended = [rank for rank, process in enumerate(self._processes) if process.exitcode is not None]
            try:
                found.update([self._results.get(timeout=1.0)])
            except queue.Empty:
                if lost := sorted(set(ended) - found.keys()):
                    raise RuntimeError(f"rank {lost[0]} ended; its error is above") from None
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no result within {patience_seconds:.0f} s") from None
        return found


@contextmanager
def _joined(rank: int, port: int, scene: Scene, **sizes: int) -> Iterator[tuple[Any, Any]]:
    """Yield (parallel, device) of this rank."""
    layout = ParallelLayout(**sizes)
    os.environ["LOCAL_RANK"] = str(scene.first_gpu + rank)
    become_rank(num_ranks=layout.world_size)
    from mcore_adapter.parallel import initialize_parallel

    device = get_device("auto")
    with device.activate():
        parallel = initialize_parallel(
            layout, rank=rank, world_size=layout.world_size,
            init_method=f"tcp://127.0.0.1:{port}", device=device, seed=1,
        )  # fmt: skip
        yield parallel, device


def _data_parallel_rank(rank: int, port: int, scene: Scene, _: Any, results: Any, overlapped: bool) -> None:
    with _joined(rank, port, scene, dp=RANKS) as (parallel, device):
        device.overlaps_communication = overlapped
        engine = make_engine(scene, parallel, device, recompute="selective")
        batch = random_batch(scene, [2048] * 64 if query_gpus() else [64] * 4)
        norms: list[float] = []
        seconds = median_seconds(device, lambda: norms.append(ppo_update(engine, batch, 16384)["grad_norm"]))
        results.put((rank, (batch.num_tokens / seconds, norms[0])))
        engine.logprobs(batch, max_tokens_per_mb=16384)  # no rank leaves while another one communicates


@dataclass(frozen=True, kw_only=True)
class Sending:
    """How ranks send weights."""

    allocation: Allocation
    """Which determines the transport."""
    layout: Mapping[str, int]
    """Of the ranks."""


def sending_rank(rank: int, port: int, scene: Scene, tasks: Any, results: Any, sending: Sending) -> None:
    """Hold random weights and send them as a rank of a run does, by the calls of TrainerRanks."""
    name = f"push-{'-'.join(sending.layout)}-rank{rank}"
    with _joined(rank, port, scene, **sending.layout) as (parallel, device), recorded(name, scene.profile):
        engine = make_engine(scene, parallel, device, trains=False)
        sender: Any = None
        buckets: Any = None
        while True:
            name, args = tasks.get()
            result = None
            if name == "connect":
                servers, bucket_bytes = args
                transport = choose_transport("auto", sending.allocation)
                plan = SenderPlan(
                    type=transport,
                    model_path=str(scene.model),
                    dtype="bfloat16",
                    bucket_bytes=bucket_bytes,
                    timeout_seconds=60.0,
                    folder=Path(scene.folder),
                )
                sender = make_sender(
                    plan, rank=rank, world_size=parallel.world_size, device=device.torch_device, host="127.0.0.1"
                )
                buckets = partial(engine.iter_hf_weights, bucket_bytes, to=plan.receivers)
                sender.connect(servers)
            elif name == "prepare":
                sender.prepare(buckets(), verify=args[0])
                device.synchronize()
            else:
                result = getattr(sender, name)(*args)
            results.put((rank, result))
