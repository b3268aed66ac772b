"""The measurements of `python -m tools.bench gpu` that need a SGLang server: sampling, weight push, log-probabilities.

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
from functools import cache, partial
from typing import Any

import aiohttp
import numpy as np
import orjson
import torch

from rollout.sglang_generator import Interrupt, SGLangGenerator
from rollout.sglang_gpus import query_gpus
from rollout.sglang_server import ServerSettings
from rollout.types import Completion, GenerateRequest, Prompt, SamplingParams
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


# Log-probabilities


def mismatch(scene: Scene) -> Iterator[Figure]:
    """What the server says of its tokens against what the trainer says: at the start, and after each of 20 updates."""
    num_gpus = len(query_gpus())
    gpu = None if not num_gpus else min(1, num_gpus - 1)
    with trainer_world() as (parallel, device):
        engine = make_engine(scene, parallel, device)
        yield from asyncio.run(_mismatch(scene, engine, device, gpu, colocated=num_gpus == 1))


async def _mismatch(scene: Scene, engine: Any, device: Any, gpu: int | None, *, colocated: bool) -> list[Figure]:
    from core.losses import ppo_loss

    settings = server_settings(scene, gpu, mem_fraction_static=0.4) if gpu is not None else server_settings(scene, gpu)
    if colocated:
        settings = replace(settings, colocated=True)
    loss = partial(
        ppo_loss, eps_clip=0.2, behave_imp_weight_cap=5.0, kl_coeff=0.0, kl_estimator="k3", entropy_coeff=0.0
    )
    async with generator(settings, "in_place") as served:
        beside = colocated or gpu is None
        sending = sender(scene, device, 1 << 30, beside=beside)
        address = replace(served.address, trainer_ranks=(0,)) if beside else served.address
        await asyncio.to_thread(sending.connect, [address])
        await push_once([served], sending, engine, 1, 1 << 30, verify=True)
        count = load().in_flight
        batch = await _sampled(scene, served, 1, count, 256 if gpu is not None else 16)
        first, tokens = _difference(engine, batch), int(batch.loss_mask.sum())
        logger.info("at the start: %.5f nats over %d tokens", first, tokens)
        later = []
        for version in range(2, 22):
            engine.train_step(batch, loss, max_tokens_per_mb=32768)
            await push_once([served], sending, engine, version, 1 << 30, verify=True)  # raises where a checksum differs
            batch = await _sampled(scene, served, version, count // 8, 256 if gpu is not None else 16)
            later.append(_difference(engine, batch))
            logger.info("version %d: %.5f nats", version, later[-1])
        await asyncio.to_thread(sending.close)
        trainer_off, server_off = _against_fp32(scene, engine, device, batch, count // 8)
    name = f"mismatch.{scene.shape}"
    return [
        Figure(name=f"{name}_at_start", value=first, unit="nats", baseline=None, target="<= 0.01"),
        Figure(name=f"{name}_trainer_against_fp32", value=trainer_off, unit="nats", baseline=None, target=""),
        Figure(name=f"{name}_server_against_fp32", value=server_off, unit="nats", baseline=None, target=""),
        Figure(name=f"{name}_num_tokens", value=float(tokens), unit="tokens", baseline=None, target=">= 100000"),
        Figure(name=f"{name}_worst_of_20_updates", value=max(later), unit="nats", baseline=first, target="no drift"),
        Figure(name=f"{name}_after_20_updates", value=later[-1], unit="nats", baseline=first, target="no drift"),
    ]


async def _sampled(scene: Scene, served: SGLangGenerator, version: int, count: int, length: int) -> Any:
    from mcore_adapter.batch import PackedBatch

    given = prompts(scene, count, seed=version)
    sampling = SamplingParams(max_new_tokens=length)
    completions: list[Completion] = await asyncio.gather(
        *(
            served.generate(GenerateRequest(request_id=f"{version}-{i}", prompt_ids=p, sampling=sampling))
            for i, p in enumerate(given)
        )
    )
    ids = [np.concatenate([p, c.token_ids]) for p, c in zip(given, completions, strict=True)]
    lens = torch.tensor([len(x) for x in ids])
    blank = [np.zeros(len(p), np.float32) for p in given]
    logprobs = np.concatenate([x for p, c in zip(blank, completions, strict=True) for x in (p, c.logprobs)])
    mask = np.concatenate([x for p, c in zip(blank, completions, strict=True) for x in (p > 0, c.logprobs <= 0)])
    sampled = torch.from_numpy(logprobs)
    advantages = torch.randn(len(sampled), generator=torch.Generator().manual_seed(version))
    return PackedBatch(
        token_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        cu_seqlens=torch.cat((torch.zeros(1, dtype=torch.int64), lens.cumsum(0))),
        loss_mask=torch.from_numpy(mask),
        fields={"rollout_logprobs": sampled, "old_logprobs": sampled, "advantages": advantages},
    )


def _difference(engine: Any, batch: Any) -> float:
    """Mean absolute difference over the sampled tokens, nats."""
    return float((_trainers(engine, batch) - batch.fields["rollout_logprobs"]).abs()[batch.loss_mask].mean())


def _trainers(engine: Any, batch: Any) -> torch.Tensor:
    """[T] log-probabilities by the trainer."""
    shard = engine.logprobs(batch, max_tokens_per_mb=32768)
    ours = torch.zeros(batch.num_tokens)
    ours[batch.token_index(shard.sequences)] = shard.values.cpu()
    return ours


@torch.no_grad()
def _against_fp32(scene: Scene, engine: Any, device: Any, batch: Any, count: int) -> tuple[float, float]:
    """How far the trainer and the server each are from the same weights computed in float32 by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    part = batch.select(range(count))
    ours, theirs = _trainers(engine, part), part.fields["rollout_logprobs"]
    with device.torch_device:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(scene.model), dtype=torch.float32).eval()
    for bucket in engine.iter_hf_weights(1 << 30):
        model.load_state_dict({name: t.float() for name, t in bucket.items()}, strict=False)
    exact = torch.zeros(part.num_tokens)
    bounds = part.cu_seqlens.tolist()
    for begin, end in zip(bounds, bounds[1:], strict=False):
        ids = part.token_ids[begin:end].to(device.torch_device)
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        exact[begin + 1 : end] = logprobs.gather(1, ids[1:, None])[:, 0].cpu()
    mask = part.loss_mask
    return float((ours - exact).abs()[mask].mean()), float((theirs - exact).abs()[mask].mean())
