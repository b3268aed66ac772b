"""The weight push of `python -m tools.bench gpu`, out of one trainer rank: pauses, and the gaps that streams see."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import aiohttp
import numpy as np
import orjson
from torch import Tensor

from allocation import parse
from core.weight_sync.buckets import Sender, make_sender
from core.weight_sync.push import SenderSettings
from mcore_adapter.device import Device
from mcore_adapter.engine import MegatronEngine
from rollout.inference.gpus import query_gpus
from rollout.inference.registry import choose_transport
from rollout.inference.sglang.generator import SGLangGenerator
from tools.bench import Figure, Scene
from tools.bench.gpu.servers import generator, prompts, server_gpus, server_settings, sizes, unlimited_session
from tools.bench.gpu.trainer import free, make_engine, model_of, trainer_world

NVLINK_BYTES_PER_SECOND = 371e9
"""A NCCL broadcast between two H200s of one host, measured without anything around it: the floor of a push."""
STREAMS = 64
"""Requests in flight on each server."""
PUSHES = 5

MakeBuckets = Callable[[], Iterator[dict[str, Tensor]]]
"""Returns the weights for one push."""

logger = logging.getLogger(__name__)


def push(scene: Scene) -> Iterator[Figure]:
    """Yield pushes while streams run: into a server on a GPU of its own (two GPUs), or beside the trainer (one)."""
    with trainer_world() as (parallel, device):
        engine = make_engine(scene, parallel, device)
        engine.offload()
        free(device)
        gpus = server_gpus()
        if gpus == [0]:
            yield from drive(_push_beside(scene, engine, device))
        else:
            yield from drive(_push_apart(scene, engine, device, gpus[:2]))


def drive(figures: AsyncIterator[Figure]) -> Iterator[Figure]:
    """Yield each figure as soon as it is measured: a later one may fail."""
    with asyncio.Runner() as runner:
        while (figure := runner.run(_next(figures))) is not None:
            yield figure


async def _next(figures: AsyncIterator[Figure]) -> Figure | None:
    return await anext(figures, None)


def sender(scene: Scene, device: Device, bucket_bytes: int, *, beside: bool) -> Sender:
    """Return what a run on one GPU (`beside`) or on two would send with."""
    text, size = ("sglang.d1m1p1", 1) if beside else ("sglang.d1m1p1+d1m1p1", 2)
    plan = SenderSettings(
        type=choose_transport("auto", parse(text, n_nodes=1, n_gpus_per_node=size)).name,
        model_path=str(model_of(scene)),
        dtype="bfloat16",
        bucket_bytes=bucket_bytes,
        timeout_seconds=60.0,
        folder=scene.folder,
        device=str(device.torch_device),
    )
    return make_sender(plan)


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """The duration of one push and of its parts, in seconds."""

    gather: float
    pause: float
    send: float
    resume: float
    gigabytes: float

    @property
    def paused(self) -> float:
        """No server samples so long."""
        return self.pause + self.send + self.resume


async def push_once(
    served: Sequence[SGLangGenerator], sending: Sender, buckets: MakeBuckets, version: int, *, verify: bool
) -> Pushed:
    """Push once with `sending`, a core.weight_sync.buckets.Sender; `buckets` makes what it prepares."""
    times = [time.perf_counter()]
    await asyncio.to_thread(lambda: sending.prepare(buckets(), verify=verify))
    times.append(time.perf_counter())
    await asyncio.gather(*(one.pause() for one in served))
    times.append(time.perf_counter())
    report = await asyncio.to_thread(sending.send)
    assert report is not None, "the first rank reports"
    times.append(time.perf_counter())
    await asyncio.gather(*(one.resume(version) for one in served))
    times.append(time.perf_counter())
    gather, pause, _, resume = np.diff(times)
    return Pushed(gather=gather, pause=pause, send=report.seconds, resume=resume, gigabytes=report.num_bytes / 1e9)


async def _push_apart(
    scene: Scene, engine: MegatronEngine, device: Device, gpus: Sequence[int | None]
) -> AsyncIterator[Figure]:
    """Yield pushes by bucket size, into one server and into two at once, as many times slower."""
    into_one: dict[int, float] = {}
    async with AsyncExitStack() as stack:
        started = [stack.enter_async_context(generator(server_settings(scene, gpu))) for gpu in gpus]
        served = await asyncio.gather(*started)
        version = 0
        for count, mib in ((1, 1024), (2, 1024), (1, 256), (1, 4096), (2, 4096)):
            some = served[:count]
            if len(some) < count:
                continue
            sending = sender(scene, device, mib << 20, beside=False)
            await asyncio.to_thread(sending.connect, [one.endpoint for one in some])
            buckets = partial(engine.iter_hf_weights, mib << 20)
            pushes, gaps = await pushes_into_streams(scene, some, sending, buckets, version)
            version += 2 + PUSHES
            await asyncio.to_thread(sending.close)
            to = f"{mib}mib" if count == 1 else f"{mib}mib_to_{count}_servers"
            for figure in push_figures(f"push.{scene.shape}_{to}", pushes, gaps, "<= 60"):
                yield figure
            longest = 1e3 * max(gaps)
            if count == 1:
                into_one[mib] = longest
            else:
                name = f"push.{scene.shape}_{to}_longest_gap_against_one"
                yield Figure(name, longest, "ms", into_one[mib], "<= 1.3x")


async def pushes_into_streams(
    scene: Scene, served: Sequence[SGLangGenerator], sending: Sender, buckets: MakeBuckets, version: int
) -> tuple[list[Pushed], list[float]]:
    """Push while every server streams; return the pushes and the longest gap that a stream saw around each of them;
    `version` is the last one pushed."""
    for _ in range(2):  # the first ones compile kernels and fill pools
        version += 1
        await push_once(served, sending, buckets, version, verify=True)
    async with AsyncExitStack() as stack:
        entering = [stack.enter_async_context(streams(scene, one.endpoint.url)) for one in served]
        arrivals = [times for server in await asyncio.gather(*entering) for times in server]
        pushes, gaps, calm = [], [], []
        for _ in range(PUSHES):
            before = time.perf_counter()
            await asyncio.sleep(0.5)
            start, version = time.perf_counter(), version + 1
            pushes.append(await push_once(served, sending, buckets, version, verify=False))
            await asyncio.sleep(0.3)
            gaps.append(gap_around(pushes[-1], arrivals, start, time.perf_counter()))
            calm.append(longest_gap(arrivals, before, start))
            logger.info("%s, longest gap %.4f s, without a push %.4f s", pushes[-1], gaps[-1], calm[-1])
    return pushes, gaps


async def _push_beside(scene: Scene, engine: MegatronEngine, device: Device) -> AsyncIterator[Figure]:
    """Push into a server on the same GPU, its memory released and resumed around it as in a colocated run."""
    settings = server_settings(scene, 0, colocated=True)
    async with generator(settings) as served:
        address = replace(served.endpoint, trainer_ranks=(0,))
        for mib in (256, 1024, 4096):
            sending = sender(scene, device, mib << 20, beside=True)
            sending.connect([address])
            buckets = partial(engine.iter_hf_weights, mib << 20)
            pushes = [await push_once([served], sending, buckets, i + 1, verify=i == 0) for i in range(6)]
            for figure in push_figures(f"push.{scene.shape}_colocated_{mib}mib", pushes[2:], None, "<= 100"):
                yield figure


def push_figures(name: str, pushes: list[Pushed], gaps: list[float] | None, target: str) -> Iterator[Figure]:
    """Yield the medians over the pushes; of `gaps` the median and the worst. `target` is that of the gap, or of the
    pause."""
    floor = 1e3 * pushes[0].gigabytes * 1e9 / NVLINK_BYTES_PER_SECOND

    def milliseconds(what: str, values: Sequence[float], baseline: float | None, target: str = "") -> Figure:
        return Figure(f"{name}_{what}", 1e3 * float(np.median(values)), "ms", baseline, target)

    rate = float(np.median([p.gigabytes / p.send for p in pushes]))
    yield Figure(f"{name}_rate", rate, "GB/s", NVLINK_BYTES_PER_SECOND / 1e9)
    yield milliseconds("send", [p.send for p in pushes], floor)
    yield milliseconds("gather", [p.gather for p in pushes], None)
    yield milliseconds("pause", [p.paused for p in pushes], floor, "" if gaps else target)
    if gaps:
        yield milliseconds("gap", gaps, floor)
        yield milliseconds("longest_gap", [max(gaps)], floor, target)


@asynccontextmanager
async def streams(scene: Scene, url: str) -> AsyncIterator[list[list[float]]]:
    """Run 64 requests that stream inside the block; at its end, yield the arrival times of each one's chunks."""
    arrivals: list[list[float]] = []

    async def one(session: aiohttp.ClientSession, prompt: np.ndarray) -> None:
        body = {
            "input_ids": prompt,
            "stream": True,
            "sampling_params": {"max_new_tokens": 20 * sizes()[2], "temperature": 1.0, "ignore_eos": True},
        }
        times: list[float] = []
        arrivals.append(times)
        async with session.post("/generate", data=orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)) as response:
            async for _ in response.content.iter_any():
                times.append(time.perf_counter())

    count = STREAMS if query_gpus() else 4
    async with unlimited_session(url) as session:
        tasks = [asyncio.create_task(one(session, prompt)) for prompt in prompts(scene, count)]
        async with asyncio.timeout(60.0):  # the first requests of a kind compile kernels
            while len(arrivals) < count or not all(arrivals):
                await asyncio.sleep(0.1)
        await asyncio.sleep(2.0)
        yield arrivals
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with session.post("/abort_request", data=orjson.dumps({"abort_all": True})) as response:
            await response.read()
        await asyncio.sleep(0.5)


def gap_around(push: Pushed, arrivals: list[list[float]], begin: float, end: float) -> float:
    """Return the longest gap of a stream between two moments around a push, in seconds, and at least the pause: a
    client that is slower than the streams reads during a pause what came before it, and sees a shorter gap."""
    return max(push.paused, longest_gap(arrivals, begin, end))


def longest_gap(arrivals: list[list[float]], begin: float, end: float) -> float:
    """Return the most seconds between two chunks of one stream, among gaps that ended between two moments; all of that
    time where none did."""
    gaps = [after - before for times in arrivals for before, after in pairwise(times) if begin <= after <= end]
    return max(gaps, default=end - begin)
