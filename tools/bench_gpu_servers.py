"""The measurements of `python -m tools.bench gpu` that need a SGLang server: sampling and weight push.

The first GPU is the trainer's. The server is on the second, or beside the trainer where there is only one. Without any
GPU everything runs on the CPU, to try the measurements out.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import aiohttp
import numpy as np
import orjson

from rollout.sglang_generator import Interrupt, SGLangGenerator
from rollout.sglang_gpus import query_gpus
from rollout.sglang_server import ServerSettings
from rollout.types import Prompt, SamplingParams
from tools.bench_gpu import NVLINK_BYTES_PER_SECOND, Figure, Scene, free, make_engine, trainer_world

STREAMS = 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much is sampled; less where there is no GPU."""

    in_flight: int = 512
    prompt_tokens: int = 128
    new_tokens: int = 1024


@cache
def load() -> Load:
    return Load() if query_gpus() else Load(in_flight=8, prompt_tokens=16, new_tokens=32)


def server_settings(scene: Scene, gpu: int | None, *, colocated: bool = False, **flags: Any) -> ServerSettings:
    on_gpu = gpu is not None
    small = {} if on_gpu else {"max_total_tokens": 8192, "sleep_on_idle": True}
    return ServerSettings(
        name=f"generator-{gpu or 0}",
        model_path=str(scene.model),
        log_file=scene.folder / f"server-{gpu}.log",
        gpus=(gpu,) if on_gpu else (),
        dtype="bfloat16",
        max_running=load().in_flight + 8,  # all of them at once, whatever the server keeps for itself
        colocated=colocated and on_gpu,
        flags={"load_format": "dummy", **small, **flags},
        python=scene.sglang_python or sys.executable,
    )


@asynccontextmanager
async def generator(settings: ServerSettings, interrupt: Interrupt = "in_place") -> AsyncIterator[SGLangGenerator]:
    started = await SGLangGenerator.start(settings, interrupt=interrupt)
    try:
        yield started
    finally:
        await started.close()


def prompts(scene: Scene, count: int, *, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, scene.vocab_size, load().prompt_tokens, dtype=np.int32) for _ in range(count)]


# Sampling


def rollout(scene: Scene) -> Iterator[Figure]:
    """Producer, router and SGLangGenerator against the bare server, the same prompts in turn. One GPU."""
    start = time.perf_counter()
    server = server_settings(scene, 0 if query_gpus() else None)
    starting, rates = asyncio.run(_compare(scene, server, start))
    ours, bare = np.median(rates, axis=0)
    yield Figure(
        name=f"rollout.{scene.shape}_tokens_per_second", value=float(ours), unit="tokens/s", baseline=float(bare),
        target=">= 0.97x",
    )  # fmt: skip
    yield Figure(name="rollout.server_start", value=starting, unit="s", baseline=None, target="< 45 the second time")


async def _compare(scene: Scene, server: ServerSettings, start: float) -> tuple[float, list[tuple[float, float]]]:
    async with generator(server) as served:
        starting = time.perf_counter() - start
        await _bare(scene, served.address.url, 0, new_tokens=16)
        rates = []
        for round_ in range(2):
            ours = await _stack(scene, served, 2 * round_ + 1)
            rates.append((ours, await _bare(scene, served.address.url, 2 * round_ + 2)))
            logger.info("tokens/s of the stack and of the bare server: %s", rates[-1])
        return starting, rates


async def _bare(scene: Scene, url: str, seed: int, new_tokens: int | None = None) -> float:
    """tokens/s of plain requests, twice as many as run at once."""
    many, limit = load(), asyncio.Semaphore(load().in_flight)
    new_tokens = new_tokens or many.new_tokens

    async def one(session: aiohttp.ClientSession, prompt: np.ndarray) -> None:
        body = {
            "input_ids": prompt, "return_logprob": True,
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True},
        }  # fmt: skip
        async with limit, session.post("/generate", data=orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)) as r:
            answer = orjson.loads(await r.read())
            assert len(answer["output_ids"]) == new_tokens, answer["meta_info"]["finish_reason"]

    timeout, headers = aiohttp.ClientTimeout(total=None), {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, headers=headers, connector=connector) as session:
        given = prompts(scene, 2 * many.in_flight, seed=seed)
        start = time.perf_counter()
        await asyncio.gather(*(one(session, prompt) for prompt in given))
        return len(given) * new_tokens / (time.perf_counter() - start)


async def _stack(scene: Scene, served: SGLangGenerator, seed: int) -> float:
    """The same through everything that a run has between the trainer and a server."""
    from transformers import AutoTokenizer

    from core.batch import pack_trajectories
    from rollout.dataset import PromptDataset
    from rollout.producer import RolloutProducer
    from rollout.reward import RewardPool
    from rollout.router import Router
    from rollout.workflow import make_workflow

    many = load()
    given = [
        Prompt(index=i, query_id=f"{seed}-{i}", task="math", text="", token_ids=ids, solutions=())
        for i, ids in enumerate(prompts(scene, 2 * many.in_flight, seed=seed))
    ]
    tokenizer = AutoTokenizer.from_pretrained(scene.model)
    async with RewardPool("tools.bench_reward:no_reward", num_workers=2) as rewards:
        workflow = make_workflow(
            "math", tokenizer=tokenizer, reward_pool=rewards, group_size=1, seed=seed,
            sampling=SamplingParams(max_new_tokens=many.new_tokens, min_new_tokens=0, stop_token_ids=()),
        )  # fmt: skip
        producer = RolloutProducer(
            PromptDataset(given, seed=0), workflow, Router([served]), batch_size=len(given), max_staleness=0,
            num_epochs=1, max_in_flight=many.in_flight,
        )  # fmt: skip
        start = time.perf_counter()
        async with producer:
            batch = pack_trajectories(await producer.take(0))
        tokens = int((batch.versions >= 0).sum())
        assert tokens == len(given) * many.new_tokens, tokens
        return tokens / (time.perf_counter() - start)


# Weight push


def push(scene: Scene) -> Iterator[Figure]:
    """A push while streams run: into a server on a GPU of its own (two GPUs), or beside the trainer (one)."""
    num_gpus = len(query_gpus())
    with trainer_world() as (parallel, device):
        engine = make_engine(scene, parallel, device)
        engine.offload()
        free(device)
        if num_gpus == 1:
            yield from asyncio.run(_push_beside(scene, engine, device))
        else:
            gpus: list[int | None] = [gpu for gpu in (1, 2) if gpu < num_gpus] or [None]  # type: ignore[misc]
            yield from asyncio.run(_push_apart(scene, engine, device, gpus))


def sender(scene: Scene, device: Any, bucket_bytes: int, *, beside: bool) -> Any:
    """What a run on one GPU (`beside`) or on two would send with."""
    from allocation import parse
    from core.push_config import choose_transport
    from core.push_servers import SenderPlan, make_sender

    text, size = ("sglang.d1m1p1", 1) if beside else ("sglang.d1m1p1+d1m1p1", 2)
    plan = SenderPlan(
        type=choose_transport("auto", parse(text, n_nodes=1, n_gpus_per_node=size)),
        model_path=str(scene.model),
        dtype="bfloat16",
        bucket_bytes=bucket_bytes,
        timeout_seconds=60.0,
        folder=scene.folder,
    )
    return make_sender(plan, rank=0, world_size=1, device=device.torch_device, host="127.0.0.1")


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What one push cost, in seconds."""

    gather: float
    pause: float
    send: float
    resume: float
    gigabytes: float


async def push_once(
    served: Sequence[SGLangGenerator], sending: Any, engine: Any, version: int, bucket_bytes: int, *, verify: bool
) -> Pushed:
    times = [time.perf_counter()]
    await asyncio.to_thread(sending.prepare, engine.iter_hf_weights(bucket_bytes), verify=verify)
    times.append(time.perf_counter())
    await asyncio.gather(*(one.pause() for one in served))
    times.append(time.perf_counter())
    report = await asyncio.to_thread(sending.send)
    times.append(time.perf_counter())
    await asyncio.gather(*(one.resume(version) for one in served))
    times.append(time.perf_counter())
    gather, pause, _, resume = np.diff(times)
    return Pushed(gather=gather, pause=pause, send=report.seconds, resume=resume, gigabytes=report.num_bytes / 1e9)


async def _push_apart(scene: Scene, engine: Any, device: Any, gpus: Sequence[int | None]) -> list[Figure]:
    """Gaps that streams see, for bucket sizes, and into all the servers at once."""
    figures: list[Figure] = []
    async with AsyncExitStack() as stack:
        started = [stack.enter_async_context(generator(server_settings(scene, gpu))) for gpu in gpus]
        served = await asyncio.gather(*started)
        rounds = [(served[:1], mib) for mib in (256, 1024, 4096)]
        rounds += [(served, 4096)] if len(served) > 1 else []
        version = 0
        for some, mib in rounds:
            sending = sender(scene, device, mib << 20, beside=False)
            await asyncio.to_thread(sending.connect, [one.address for one in some])
            for _ in range(2):  # the first ones compile kernels and fill pools
                version += 1
                await push_once(some, sending, engine, version, mib << 20, verify=version == 1)
            async with streams(scene, some[0].address.url) as arrivals:
                pushes = []
                for _ in range(5):
                    await asyncio.sleep(0.5)
                    version += 1
                    pushes.append(await push_once(some, sending, engine, version, mib << 20, verify=False))
                    logger.info("%s", pushes[-1])
                await asyncio.sleep(0.5)
            await asyncio.to_thread(sending.close)
            to = f"{mib}mib" if len(some) == 1 else f"{mib}mib_to_{len(some)}_servers"
            figures += _push_figures(f"push.{scene.shape}_{to}", pushes, longest_gap(arrivals))
    return figures


async def _push_beside(scene: Scene, engine: Any, device: Any) -> list[Figure]:
    """Into a server on the same GPU, its memory released and resumed around it as in a colocated run."""
    figures: list[Figure] = []
    settings = server_settings(scene, 0, colocated=True)
    async with generator(settings, "abort") as served:
        address = replace(served.address, trainer_ranks=(0,))
        for mib in (256, 1024, 4096):
            sending = sender(scene, device, mib << 20, beside=True)
            sending.connect([address])
            pushes = [await push_once([served], sending, engine, i + 1, mib << 20, verify=i == 0) for i in range(6)]
            figures += _push_figures(f"push.{scene.shape}_colocated_{mib}mib", pushes[2:], None)
        figures += await _turns(served, sending, engine, device)
    return figures


async def _turns(served: SGLangGenerator, sending: Any, engine: Any, device: Any) -> list[Figure]:
    """Seconds of each half of a turn, and what each side leaves on the GPU."""
    seconds: dict[str, list[float]] = {"release": [], "reload": [], "offload": [], "resume": []}
    used: dict[str, float] = {}
    for turn in range(4):
        start = time.perf_counter()
        await served.pause()
        await served.release_memory(["kv_cache", "weights"])
        seconds["release"].append(time.perf_counter() - start)
        used["released"] = query_gpus()[0].used_mib / 1024
        start = time.perf_counter()
        engine.reload()
        device.synchronize()
        seconds["reload"].append(time.perf_counter() - start)
        sending.prepare(engine.iter_hf_weights(4096 << 20), verify=False)
        start = time.perf_counter()
        await served.resume_memory(["weights"])
        seconds["resume"].append(time.perf_counter() - start)
        await asyncio.to_thread(sending.send)
        start = time.perf_counter()
        engine.offload()
        free(device)
        seconds["offload"].append(time.perf_counter() - start)
        used["offloaded"] = device.memory_stats()["allocated_gib"]
        start = time.perf_counter()
        await served.resume_memory(["kv_cache"])
        await served.resume(100 + turn)
        seconds["resume"][-1] += time.perf_counter() - start
        used["generating"] = query_gpus()[0].used_mib / 1024
    figures = [
        Figure(name=f"push.colocated_{name}", value=float(np.median(s[1:])), unit="s", baseline=None, target="")
        for name, s in seconds.items()
    ]
    labels = {
        "released": "whole_gpu_with_the_server_released_and_the_trainer_offloaded",
        "offloaded": "trainer_allocated_when_offloaded",
        "generating": "whole_gpu_while_generating",
    }
    return figures + [
        Figure(name=f"memory.colocated_{labels[name]}", value=value, unit="GiB", baseline=None, target="")
        for name, value in used.items()
    ]


def _push_figures(name: str, pushes: list[Pushed], gap: float | None) -> list[Figure]:
    floor = 1e3 * pushes[0].gigabytes * 1e9 / NVLINK_BYTES_PER_SECOND

    def middle(values: list[float]) -> float:
        return 1e3 * float(np.median(values))

    send = middle([p.send for p in pushes])
    figures = [
        Figure(name=f"{name}_send", value=send, unit="ms", baseline=floor, target=""),
        Figure(
            name=f"{name}_bandwidth", value=1e3 * pushes[0].gigabytes / send, unit="GB/s",
            baseline=NVLINK_BYTES_PER_SECOND / 1e9, target="",
        ),
        Figure(name=f"{name}_gather", value=middle([p.gather for p in pushes]), unit="ms", baseline=None, target=""),
        Figure(
            name=f"{name}_pause", value=middle([p.pause + p.send + p.resume for p in pushes]), unit="ms",
            baseline=floor, target="<= 100" if gap is None else "",
        ),
    ]  # fmt: skip
    if gap is not None:
        figures.append(Figure(name=f"{name}_longest_gap", value=1e3 * gap, unit="ms", baseline=floor, target="<= 60"))
    return figures


@asynccontextmanager
async def streams(scene: Scene, url: str) -> AsyncIterator[list[list[float]]]:
    """64 requests that stream for as long as this lasts; when it ends, the arrival times of each one's chunks."""
    arrivals: list[list[float]] = []
    many = load()

    async def one(session: aiohttp.ClientSession, prompt: np.ndarray) -> None:
        body = {
            "input_ids": prompt, "stream": True,
            "sampling_params": {"max_new_tokens": 20 * many.new_tokens, "temperature": 1.0, "ignore_eos": True},
        }  # fmt: skip
        times: list[float] = []
        arrivals.append(times)
        async with session.post("/generate", data=orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)) as response:
            async for _ in response.content.iter_any():
                times.append(time.perf_counter())

    timeout, headers = aiohttp.ClientTimeout(total=None), {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    count = STREAMS if query_gpus() else 4
    async with aiohttp.ClientSession(url, timeout=timeout, headers=headers, connector=connector) as session:
        tasks = [asyncio.create_task(one(session, prompt)) for prompt in prompts(scene, count)]
        await asyncio.sleep(2.0)
        marks = [len(times) for times in arrivals]
        begun = [times[:] for times in arrivals]
        assert all(begun) and all(marks), "a stream did not begin"
        yield arrivals
        for times, mark in zip(arrivals, marks, strict=True):
            del times[: mark - 1]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with session.post("/abort_request", data=orjson.dumps({"abort_all": True})) as response:
            await response.read()
        await asyncio.sleep(0.5)


def longest_gap(arrivals: list[list[float]]) -> float:
    """Seconds between two chunks of one stream, at most."""
    return max(float(np.diff(times).max()) for times in arrivals)
