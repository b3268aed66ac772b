"""Measurements of sampling and server starts on GPUs, and what all measurements with a SGLang server share.

The first GPU is the trainer's. The server is on the second, or beside the trainer where there is only one. Without any
GPU everything runs on the CPU, to try the measurements out.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import aiohttp
import numpy as np
import orjson

from core.data.rollout_batch import pack_trajectories
from model_specs.hf_config import read_config
from rollout.data.prompts import PromptDataset
from rollout.data.task_sets import TaskSets
from rollout.experience import Lessee, MemoryExperience, make_rules
from rollout.inference.backend import BackendSettings, GeneratorConfig
from rollout.inference.gpus import query_gpus
from rollout.inference.router import Router
from rollout.inference.sglang.generator import SGLangGenerator
from rollout.inference.sglang.server import (
    BATCHED_PREFILLS,
    free_ports,
    server_environment,
    server_flags,
)
from rollout.processes import end_group
from rollout.producer import RolloutProducer
from rollout.rewards.pool import RewardPool
from rollout.types import Prompt, SamplingParams
from rollout.workflows import make_workflow
from tools.bench import Figure
from tools.bench.gpu.trainer import Scene

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


def server_settings(scene: Scene, gpu: int | None, *, colocated: bool = False, **flags: Any) -> BackendSettings:
    on_gpu = gpu is not None
    small = {} if on_gpu else {"max_total_tokens": 8192, "sleep_on_idle": True}
    return BackendSettings(
        name=f"generator-{gpu or 0}",
        model_path=str(scene.model),
        log_file=scene.folder / f"server-{gpu}.log",
        gpus=() if gpu is None else (gpu,),
        colocated=colocated and on_gpu,
        config=GeneratorConfig(
            interrupt="in_place",
            max_running=load().in_flight + 8,  # all of them at once, whatever the server keeps for itself
            flags={"load_format": "dummy", **small, **flags},
            python=str(scene.sglang_python or sys.executable),
        ),
    )


@asynccontextmanager
async def generator(settings: BackendSettings) -> AsyncIterator[SGLangGenerator]:
    started = await SGLangGenerator.start(settings)
    try:
        yield started
    finally:
        await started.close()


def prompts(scene: Scene, count: int, *, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, scene.vocab_size, load().prompt_tokens, dtype=np.int32) for _ in range(count)]


def rollout(scene: Scene) -> Iterator[Figure]:
    """Yield the rate of producer, router and SGLangGenerator against SGLang's launch_server with the arguments of a
    run's server and the same prompts. One GPU."""
    server = server_settings(scene, 0 if query_gpus() else None)
    ours = asyncio.run(_sample(scene, server))
    bare = asyncio.run(_sample_bare(scene, server))
    name = f"rollout.{scene.shape}_tokens_per_second"
    yield Figure(name=name, value=ours, unit="tokens/s", baseline=bare, target=">= 0.97x")


LATER_STARTS = 2
"""Measured starts of a run's server and of SGLang's launch_server, which alternate."""


def server_start(scene: Scene) -> Iterator[Figure]:
    """Yield the seconds from the start of a server until it answers: of the first one on a host, where no other ran
    before, and of later ones against SGLang's launch_server with the same arguments. One GPU."""
    server = server_settings(scene, 0 if query_gpus() else None)
    first = asyncio.run(_seconds_to_start(generator(server)))
    yield Figure(name="server_start.first", value=first, unit="s", baseline=None, target="<= 60")
    later, bare = [], []
    for _ in range(LATER_STARTS):
        bare.append(asyncio.run(_seconds_to_start(bare_server(server))))
        later.append(asyncio.run(_seconds_to_start(generator(server))))
    logger.info("seconds of later starts: %s; of launch_server: %s", later, bare)
    baseline = float(np.median(bare))
    yield Figure(name="server_start.later", value=float(np.median(later)), unit="s", baseline=baseline, target="<= 30")


async def _seconds_to_start(server: AbstractAsyncContextManager[Any]) -> float:
    start = time.perf_counter()
    async with server:
        return time.perf_counter() - start


SEEDS = (1, 2)
"""Seeds of the prompts of each round."""


async def _sample(scene: Scene, server: BackendSettings) -> float:
    """Return tokens/s of the stack."""
    served = await SGLangGenerator.start(server)
    router = Router([served])
    try:
        await _plainly(scene, served.endpoint.url, 0, new_tokens=16)
        rates = [await _stack(scene, router, seed) for seed in SEEDS]
        logger.info("tokens/s of the stack: %s", rates)
        return float(np.median(rates))
    finally:
        await router.close()


async def _sample_bare(scene: Scene, server: BackendSettings) -> float:
    async with bare_server(server) as url:
        await _plainly(scene, url, 0, new_tokens=16)
        rates = [await _plainly(scene, url, seed) for seed in SEEDS]
        logger.info("tokens/s of SGLang's launch_server: %s", rates)
        return float(np.median(rates))


@asynccontextmanager
async def bare_server(settings: BackendSettings) -> AsyncIterator[str]:
    """Start SGLang's launch_server with the arguments of a run's server, except those of our hooks; yield its URL."""
    port, nccl_port = free_ports(2)
    flags = server_flags(settings, read_config(settings.model_path), port=port, nccl_port=nccl_port)
    words = [str(settings.config.python), "-P", "-m", "sglang.launch_server"]
    for name, value in flags.items():
        if name not in BATCHED_PREFILLS and value is not False:
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    log, url = settings.log_file.with_suffix(".bare.log"), f"http://{settings.host}:{port}"
    with log.open("wb") as file:
        env = server_environment(settings)
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        async with aiohttp.ClientSession(url) as session:
            while not await _is_up(session):
                if process.poll() is not None:
                    raise RuntimeError(f"SGLang ended with {process.returncode}:\n{log.read_text()[-3000:]}")
                await asyncio.sleep(0.2)
        yield url
    finally:
        end_group(process, grace_seconds=10.0)


async def _is_up(session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get("/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def _plainly(scene: Scene, url: str, seed: int, new_tokens: int | None = None) -> float:
    """Return tokens/s of direct requests, twice as many as run at once."""
    new_tokens = new_tokens or load().new_tokens
    sampling = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
    bodies = [
        {"input_ids": prompt, "return_logprob": True, "sampling_params": sampling}
        for prompt in prompts(scene, 2 * load().in_flight, seed=seed)
    ]
    start = time.perf_counter()
    lengths = await ask_plainly(url, bodies, at_once=load().in_flight)
    seconds = time.perf_counter() - start
    assert set(lengths) == {new_tokens}, f"answers of {sorted(set(lengths))} tokens"
    return sum(lengths) / seconds


async def ask_plainly(url: str, bodies: Sequence[dict[str, object]], *, at_once: int) -> list[int]:
    """Return how many tokens a server answers to each request."""
    limit = asyncio.Semaphore(at_once)

    async def one(session: aiohttp.ClientSession, body: dict[str, object]) -> int:
        async with limit, session.post("/generate", data=orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)) as r:
            return len(orjson.loads(await r.read())["output_ids"])

    timeout, headers = aiohttp.ClientTimeout(total=None), {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, headers=headers, connector=connector) as session:
        return await asyncio.gather(*(one(session, body) for body in bodies))


async def _stack(scene: Scene, router: Router, seed: int) -> float:
    """Return the rate through all components between the trainer and a server."""
    from transformers import AutoTokenizer

    many = load()
    given = [
        Prompt(index=i, query_id=f"{seed}-{i}", task="math", text="", token_ids=ids, solutions=())
        for i, ids in enumerate(prompts(scene, 2 * many.in_flight, seed=seed))
    ]
    tokenizer = AutoTokenizer.from_pretrained(scene.model)
    async with RewardPool("tools.bench.workload:coin_reward", num_workers=2) as rewards:
        workflow = make_workflow(
            "math",
            tokenizer=tokenizer,
            reward_pool=rewards,
            group_size=1,
            seed=seed,
            sampling=SamplingParams(max_new_tokens=many.new_tokens, min_new_tokens=0, stop_token_ids=()),
        )
        rules = make_rules(num_prompts=len(given), batch_size=len(given), max_staleness=0, num_epochs=1)
        experience, dataset = MemoryExperience(), TaskSets.of(PromptDataset(given, seed=0))
        producer = RolloutProducer(dataset, workflow, router, experience, rules, max_in_flight=many.in_flight)
        start = time.perf_counter()
        async with producer:
            taken = await Lessee(experience, rules).take(0)
            batch = pack_trajectories([e.trajectories for e in taken], [e.tags.id for e in taken])
        tokens = int((batch.versions >= 0).sum())
        assert tokens == len(given) * many.new_tokens, tokens
        return tokens / (time.perf_counter() - start)
