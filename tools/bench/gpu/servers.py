"""Measurements of sampling and server starts on GPUs, and what all measurements with a SGLang server share.

The first GPU is the trainer's. The server is on the second, or beside the trainer where there is only one. Without any
GPU everything runs on the CPU, to try the measurements out.
"""

import asyncio
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import aiohttp
import numpy as np
import orjson
from transformers import AutoTokenizer

from allocation import ParallelLayout
from core.data.rollout_batch import pack_trajectories
from core.planning.rates import Calibration, calibration_of, wave_seconds
from core.planning.scene import Gpu, Servers, gpu_of_machine
from core.planning.scene import Scene as PlannedScene
from core.planning.server_memory import plan_servers
from model_specs.families import parse_config, read_config
from rollout.data.prompts import PromptDataset
from rollout.data.task_sets import TaskSets
from rollout.experience import Lessee, MemoryExperience, make_rules
from rollout.inference.backend import BackendSettings, GeneratorConfig
from rollout.inference.gpus import query_gpus
from rollout.inference.router import Router
from rollout.inference.sglang.generator import SGLangGenerator
from rollout.inference.sglang.server import BATCHED_PREFILLS, free_ports, server_environment, server_flags
from rollout.processes import end_group
from rollout.producer import RolloutProducer
from rollout.rewards.pool import RewardPool
from rollout.types import Prompt, SamplingParams
from rollout.workflows import make_workflow
from tools.bench import MODELS, Figure, Scene
from tools.bench.gpu.trainer import model_of, vocab_size

logger = logging.getLogger(__name__)


def sizes() -> tuple[int, int, int]:
    """Return requests in flight, prompt tokens and new tokens; fewer where there is no GPU."""
    return (512, 128, 1024) if query_gpus() else (8, 16, 32)


def server_gpus() -> list[int | None]:
    """Return GPUs for servers apart from the trainer's first one; the trainer's own where there is no other, None where
    there is none at all."""
    num_gpus = len(query_gpus())
    return list(range(1, num_gpus)) or [0 if num_gpus else None]


def server_settings(scene: Scene, gpu: int | None, *, colocated: bool = False) -> BackendSettings:
    small = {} if gpu is not None else {"max_total_tokens": 8192, "sleep_on_idle": True}
    return BackendSettings(
        name=f"generator-{gpu or 0}",
        model_path=str(model_of(scene)),
        log_file=scene.folder / f"server-{gpu}.log",
        gpus=() if gpu is None else (gpu,),
        colocated=colocated,
        config=GeneratorConfig(
            interrupt="in_place",
            max_running=sizes()[0] + 8,  # all of them at once, whatever the server keeps for itself
            flags={"load_format": "dummy", **small},
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


def prompts(scene: Scene, count: int, *, seed: int = 0, length: int | None = None) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    vocabulary, length = vocab_size(scene), length or sizes()[1]
    return [rng.integers(0, vocabulary, length, dtype=np.int32) for _ in range(count)]


SEEDS = (1, 2)
"""Seeds of the prompts of each round."""
LATER_STARTS = 2
"""Measured starts of a run's server and of SGLang's launch_server, which alternate."""


def rollout(scene: Scene) -> Iterator[Figure]:
    """Yield the rate of producer, router and SGLangGenerator against SGLang's launch_server with the arguments of a
    run's server and the same prompts. One GPU."""
    ours, bare = asyncio.run(_rates(scene, server_settings(scene, 0 if query_gpus() else None)))
    yield Figure(f"rollout.{scene.shape}_tokens_per_second", ours, "tokens/s", bare, ">= 0.97x")


def server_start(scene: Scene) -> Iterator[Figure]:
    """Yield the seconds from the start of a server until it answers: of the first one on a host, where no other ran
    before, and of later ones against SGLang's launch_server with the same arguments. One GPU."""
    server = server_settings(scene, 0 if query_gpus() else None)
    yield Figure("server_start.first", asyncio.run(_seconds_to_start(generator(server))), "s", target="<= 60")
    later, bare = [], []
    for _ in range(LATER_STARTS):
        bare.append(asyncio.run(_seconds_to_start(bare_server(server))))
        later.append(asyncio.run(_seconds_to_start(generator(server))))
    logger.info("seconds of later starts: %s; of launch_server: %s", later, bare)
    yield Figure("server_start.later", statistics.median(later), "s", statistics.median(bare), "<= 30")


@dataclass(frozen=True, kw_only=True)
class Wave:
    """Requests that a server gets at once, with tokens of each."""

    requests: int
    prompt: int
    answer: int

    def __str__(self) -> str:
        return f"{self.requests} x ({self.prompt} + {self.answer})"


WAVES = (
    Wave(requests=128, prompt=128, answer=512),
    Wave(requests=64, prompt=2048, answer=512),
    Wave(requests=512, prompt=128, answer=256),
    Wave(requests=32, prompt=8192, answer=256),
    Wave(requests=256, prompt=128, answer=512),
    Wave(requests=32, prompt=128, answer=512),
)
_TRIAL_WAVES = (Wave(requests=4, prompt=16, answer=8), Wave(requests=2, prompt=32, answer=16))
"""In place of WAVES without GPUs."""


def planned_server(shape: str) -> Servers:
    """Return a server of these measurements on a GPU as the planner describes it."""
    return Servers(
        backend="sglang", config=parse_config(MODELS[shape]), layout=ParallelLayout(), itemsize=2, fp8=False,
        max_running=520, share=None, colocated_share=0.6, on_gpu=True,
    )  # fmt: skip


def predicted_waves(shape: str, gpu: Gpu, calibration: Calibration) -> dict[str, float]:
    """Return the tokens of the cache of a server, and new tokens/s of each wave."""
    server = planned_server(shape)
    alone = PlannedScene(
        gpu=gpu, on_gpu=True, engines=(), servers=server, shares_gpus=False, n_nodes=1, n_gpus_per_node=1,
        bucket_bytes=0, sequences=0, prompts=0, group_size=1, minibatches=1, prompt_tokens=0, answer_tokens=0,
        max_staleness=0, writes_checkpoints=False,
    )  # fmt: skip

    def rate(wave: Wave) -> float:
        seconds = wave_seconds(server, calibration, running=wave.requests, prompt=wave.prompt, answer=wave.answer)
        return wave.requests * wave.answer / seconds

    return {"cache": float(plan_servers(alone, server).tokens)} | {str(wave): rate(wave) for wave in WAVES}


def waves(scene: Scene) -> Iterator[Figure]:
    """Yield the tokens of the cache of a server and its rate at each wave of requests, beside what is predicted of
    them. One GPU."""
    gpu = gpu_of_machine()
    rates = None if gpu is None or not query_gpus() else calibration_of(gpu.name)
    guess = {} if gpu is None or rates is None else predicted_waves(scene.shape, gpu, rates)
    for name, value in asyncio.run(_waves(scene)).items():
        unit, target = ("tokens", "within 1 %") if name == "cache" else ("tokens/s", "within 7 %")
        yield Figure(f"waves.{scene.shape} {name}", value, unit, guess.get(name), target)


async def _waves(scene: Scene) -> dict[str, float]:
    gpu = 0 if query_gpus() else None
    async with generator(server_settings(scene, gpu)) as server:
        url = server.endpoint.url
        async with aiohttp.ClientSession(url) as session, session.get("/server_info") as response:
            info = await response.json()
        found = {"cache": float(info["max_total_num_tokens"])}
        for wave in WAVES if gpu is not None else _TRIAL_WAVES:
            for seed, tokens in ((1, 8), (2, wave.answer)):  # first kernels for these sizes
                asked = prompts(scene, wave.requests, seed=seed, length=wave.prompt)
                found[str(wave)] = await _answered(url, asked, tokens, wave.requests)
    return found


async def _seconds_to_start(server: AbstractAsyncContextManager[object]) -> float:
    start = time.perf_counter()
    async with server:
        return time.perf_counter() - start


async def _rates(scene: Scene, server: BackendSettings) -> tuple[float, float]:
    """Return tokens/s of the stack and of SGLang's launch_server, each after a warm-up."""
    served = await SGLangGenerator.start(server)
    router = Router([served])
    try:
        await _plainly(scene, served.endpoint.url, 0, new_tokens=16)
        ours = [await _stack(scene, router, seed) for seed in SEEDS]
    finally:
        await router.close()
    async with bare_server(server) as url:
        await _plainly(scene, url, 0, new_tokens=16)
        bare = [await _plainly(scene, url, seed) for seed in SEEDS]
    logger.info("tokens/s of the stack: %s; of SGLang's launch_server: %s", ours, bare)
    return statistics.median(ours), statistics.median(bare)


@asynccontextmanager
async def bare_server(settings: BackendSettings) -> AsyncIterator[str]:
    """Start SGLang's launch_server with the arguments of a run's server, except those of our hooks; yield its URL."""
    port, nccl_port = free_ports(2)
    flags = server_flags(settings, read_config(settings.model_path), port=port, nccl_port=nccl_port)
    words = [settings.interpreter, "-P", "-m", "sglang.launch_server"]
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
    in_flight, _, most = sizes()
    return await _answered(url, prompts(scene, 2 * in_flight, seed=seed), new_tokens or most, in_flight)


async def _answered(url: str, asked: Sequence[np.ndarray], new_tokens: int, in_flight: int) -> float:
    """Return tokens/s of requests that a server gets directly."""
    limit = asyncio.Semaphore(in_flight)

    async def one(session: aiohttp.ClientSession, prompt: np.ndarray) -> int:
        sampling = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": prompt, "return_logprob": True, "sampling_params": sampling}
        async with limit, session.post("/generate", data=orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)) as r:
            return len(orjson.loads(await r.read())["output_ids"])

    start = time.perf_counter()
    async with unlimited_session(url) as session:
        lengths = await asyncio.gather(*(one(session, prompt) for prompt in asked))
    seconds = time.perf_counter() - start
    assert set(lengths) == {new_tokens}, f"answers of {sorted(set(lengths))} tokens"
    return sum(lengths) / seconds


def unlimited_session(url: str) -> aiohttp.ClientSession:
    """Return a session for any number of requests of any duration."""
    timeout, headers = aiohttp.ClientTimeout(total=None), {"Content-Type": "application/json"}
    return aiohttp.ClientSession(url, timeout=timeout, headers=headers, connector=aiohttp.TCPConnector(limit=0))


async def _stack(scene: Scene, router: Router, seed: int) -> float:
    """Return the rate through all components between the trainer and a server."""
    in_flight, _, new_tokens = sizes()
    given = [
        Prompt(index=i, query_id=f"{seed}-{i}", task="math", text="", token_ids=ids, solutions=())
        for i, ids in enumerate(prompts(scene, 2 * in_flight, seed=seed))
    ]
    tokenizer = AutoTokenizer.from_pretrained(model_of(scene))
    async with RewardPool("tools.bench.workload:coin_reward", num_workers=2) as rewards:
        workflow = make_workflow(
            "math",
            tokenizer=tokenizer,
            reward_pool=rewards,
            group_size=1,
            seed=seed,
            sampling=SamplingParams(max_new_tokens=new_tokens, min_new_tokens=0, stop_token_ids=()),
        )
        rules = make_rules(num_prompts=len(given), batch_size=len(given), max_staleness=0, num_epochs=1)
        experience, dataset = MemoryExperience(), TaskSets.of(PromptDataset(given, seed=0))
        producer = RolloutProducer(dataset, workflow, router, experience, rules, max_in_flight=in_flight)
        start = time.perf_counter()
        async with producer:
            taken = await Lessee(experience, rules).take(0)
            batch = pack_trajectories([e.trajectories for e in taken], [e.tags.id for e in taken])
        tokens = int((batch.versions >= 0).sum())
        assert tokens == len(given) * new_tokens, tokens
        return tokens / (time.perf_counter() - start)
