"""Measurements of agents on the CPU.

`--only agents`: what the journal of episodes and the session server cost a generator, which has a process and a core of
its own. `--only sandbox`: calls of a short program at each level of the sandbox. Rounds alternate, medians count.

A conversation has NUM_TURNS answers of 16 to 48 tokens, with a question of a user between two. All ways sample the same
numbers of tokens; the requests of the session server travel over HTTP, and its clients run in its process, too. What it
adds to a call is measured with SESSIONS conversations, one after the other begun, whose answers take ANSWER_SECONDS.
"""

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import aiohttp
import numpy as np

from allocation import parse
from core.config.runtime import DeadlineConfig
from core.launch.cluster import Cluster
from core.launch.generator_actor import ActorGenerator
from core.launch.generators import GeneratorPool
from core.processes.stacks import forget_modules
from core.train.recover import MemoryLimits
from rollout.data.encoder import Encoder, PromptFormat
from rollout.data.prompts import PromptDataset
from rollout.data.task_sets import TaskSets
from rollout.data.tokenizer import load_tokenizer
from rollout.experience import Lessee, MemoryExperience, make_rules
from rollout.inference.backend import BackendSettings, GeneratorConfig
from rollout.inference.router import Router
from rollout.journal import JournaledSampler, recorded
from rollout.producer import RolloutProducer
from rollout.sandbox.pool import LEVELS, Sandbox, SandboxSettings
from rollout.sessions.bridge import Bridge
from rollout.sessions.server import SessionServer
from rollout.sessions.session import Limits, Session
from rollout.trajectories import TrajectoryBuilder
from rollout.types import Completion, GenerateRequest, Prompt, Sampler, SamplingParams, Trajectory
from tools.bench import Figure, Scene
from tools.bench.cpu import small_model

CONVERSATIONS, NUM_TURNS, ROUNDS = 32, 4, 4
MEASURED = 2 * CONVERSATIONS
"""Conversations of which a rate is."""
CHECKPOINT_SECONDS = 2.0
SESSIONS, ANSWER_SECONDS = 256, 4.0
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %} {% endif %}"
SAMPLING = SamplingParams(max_new_tokens=48, min_new_tokens=48, stop_token_ids=(1,))


def _length(number: int, turn: int) -> int:
    """Return the tokens of an answer; they differ, as conversations in step would wait for each other's requests."""
    return 16 + (7919 * number + 104_729 * turn) % 33


def _sampling(number: int, turn: int) -> SamplingParams:
    return SAMPLING.at_most(_length(number, turn))


CODE = "def f(n):\n    return f(n - 1) * n if n else 1\nprint(f(20))\nsum(x * x for x in range(100))"
NUM_CALLS = 500


def sandbox(scene: Scene) -> Iterator[Figure]:
    """Yield calls/s of each level of the sandbox, with two workers for each core."""
    num_workers = 2 * len(os.sched_getaffinity(0))
    sandboxes = {level: Sandbox(SandboxSettings(level=level, num_workers=num_workers)) for level in LEVELS}
    rates: dict[str, list[float]] = {level: [] for level in LEVELS}
    with ThreadPoolExecutor(num_workers) as pool:
        for _ in range(ROUNDS + 1):
            for level, one in sandboxes.items():
                began = time.perf_counter()
                assert all(ran.status == "ok" for ran in pool.map(one.run, [CODE] * NUM_CALLS))
                rates[level].append(NUM_CALLS / (time.perf_counter() - began))
    for level, one in sandboxes.items():
        one.close()
        print(f"{level}:", ", ".join(f"{rate:,.0f}" for rate in rates[level][1:]), flush=True)
        yield Figure(
            f"sandbox.calls_per_second_{level}", float(np.median(rates[level][1:])), "calls/s", target=">= 500"
        )


def agents(scene: Scene) -> Iterator[Figure]:
    """Yield tokens/s of a generator of 8M parameters, and processor time of the process that asks it: with and without
    the journal, through the session server and without it; each side runs in turns after one round of warm-up."""
    model = small_model(scene.folder, "8M", hidden_size=384, num_layers=5)
    allocation = parse("embedded.d1m1p1+d1m1p1", n_nodes=1, n_gpus_per_node=2)
    config = GeneratorConfig(max_running=CONVERSATIONS)
    with Cluster(
        joined=None, envs={}, num_actors=1, startup_timeout_seconds=600.0, deadlines=DeadlineConfig(),
        log_folder=scene.folder,
    ) as cluster:  # fmt: skip
        cluster.reserve(allocation.only(allocation.generator.role))
        settings = BackendSettings(model_path=str(model), dtype="float32", device="cpu", config=config)
        pool = GeneratorPool(
            cluster, allocation.generator, settings, threads=1, restarts=False, memory=MemoryLimits()
        )  # fmt: skip
        pool.wait_started()
        router = Router({name: ActorGenerator(actor) for name, actor in pool.actors.items()})
        encoder = Encoder(load_tokenizer(model), PromptFormat(chat_template=TEMPLATE), folder=model)
        yield from asyncio.run(_agents(router, Bridge(encoder)))
        pool.close()


async def _agents(router: Router, bridge: Bridge) -> list[Figure]:
    forget_modules()  # as the rollout process of a run does
    journal = await _medians(lambda: _journaled(router, is_kept=True), lambda: _journaled(router, is_kept=False))
    sessions = await _medians(lambda: _through_sessions(router, bridge), lambda: _bare(router, bridge))
    await router.close()
    added = await _added_by_sessions(bridge)
    print("added to a call, ms: mean, p95:", *np.round([np.mean(added), np.quantile(added, 0.95)], 2), flush=True)
    return [
        Figure("agents.session_ms_per_call", float(np.median(added)), "ms", target="<= 5"),
        Figure("agents.tokens_per_second_journaled", journal[0][0], "tokens/s", journal[1][0], ">= 0.98x"),
        Figure("agents.cpu_us_per_token_journaled", journal[0][1], "us", journal[1][1]),
        Figure("agents.tokens_per_second_sessions", sessions[0][0], "tokens/s", sessions[1][0], ">= 0.97x"),
        Figure("agents.cpu_us_per_token_sessions", sessions[0][1], "us", sessions[1][1]),
    ]


Rate = tuple[float, float]
"""Tokens/s, and microseconds of processor time of this process for each token."""


async def _medians(first: Callable[[], Awaitable[Rate]], second: Callable[[], Awaitable[Rate]]) -> tuple[Rate, Rate]:
    pairs = [(await first(), await second()) for _ in range(ROUNDS + 1)][1:]
    print("rounds:", ", ".join(f"{a:,.0f} / {b:,.0f}" for (a, _), (b, _) in pairs), flush=True)
    (a, cpu_a), (b, cpu_b) = np.median(np.array(pairs), axis=0).tolist()
    return (a, cpu_a), (b, cpu_b)


class _Clock:
    def __init__(self) -> None:
        self._seconds, self._cpu_seconds = time.perf_counter(), time.process_time()

    def rate(self, tokens: int) -> Rate:
        """Return the rate of tokens since the clock was made."""
        cpu_seconds = time.process_time() - self._cpu_seconds
        return tokens / (time.perf_counter() - self._seconds), 1e6 * cpu_seconds / tokens


class _Turns:
    """A workflow of NUM_TURNS answers, with a recorded call of a tool between two."""

    def __init__(self) -> None:
        self.ended = self.tokens = 0

    async def run(self, prompt: Prompt, generator: Sampler) -> list[Trajectory]:
        sample = TrajectoryBuilder(prompt, number=0)
        for turn in range(NUM_TURNS):
            sample.sampled(await generator.generate(sample.request(_sampling(prompt.index, turn), seed=1)))
            if turn < NUM_TURNS - 1:
                result = await recorded("tool", self._call, asked=turn)
                sample.observed([2 + int(digit) for digit in result])
        self.ended += 1
        self.tokens += sum(_length(prompt.index, turn) for turn in range(NUM_TURNS))
        return [sample.build(float(prompt.index % 2))]

    async def _call(self) -> str:
        return "12345678"


class _NotJournaled(JournaledSampler):
    """Passes requests and calls on, and records nothing."""

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await self._sampler.generate(request)
        self._finish(completion)
        return completion

    def enter(self) -> None:
        """Leave recorded() without a journal."""


async def _journaled(router: Router, *, is_kept: bool) -> Rate:
    """Return the tokens/s of a producer whose state is taken as for a checkpoint every CHECKPOINT_SECONDS."""
    empty = np.array([5, 6, 7], np.int32)
    prompts = [
        Prompt(query_id=str(i), index=i, task="t", text="", token_ids=empty, solutions=()) for i in range(20_000)
    ]
    workflow, experience = _Turns(), MemoryExperience()
    rules = make_rules(num_prompts=len(prompts), batch_size=16, max_staleness=10_000, num_epochs=1)
    lessee = Lessee(experience, rules)
    with patch("rollout.producer.JournaledSampler", JournaledSampler if is_kept else _NotJournaled):
        producer = RolloutProducer(
            TaskSets.of(PromptDataset(prompts, seed=0)), workflow, router, experience, rules,
            max_in_flight=CONVERSATIONS * 5 // 4, group_size=1,
        )  # fmt: skip

        async def train() -> None:
            for step in itertools.count():
                await lessee.take(step)
                lessee.trained(step + 1)
                producer.set_version(step + 1)

        async def save() -> None:
            while True:
                await asyncio.sleep(CHECKPOINT_SECONDS)
                await producer.record_partial()
                producer.state_dict(), experience.state_dict()

        async with producer:
            tasks = [asyncio.create_task(train()), asyncio.create_task(save())]
            await _until(lambda: workflow.ended >= CONVERSATIONS)
            ended, tokens, clock = workflow.ended, workflow.tokens, _Clock()
            await _until(lambda: workflow.ended >= ended + MEASURED)
            rate = clock.rate(workflow.tokens - tokens)
            for task in tasks:
                if task.done():
                    task.result()
                task.cancel()
    return rate


async def _bare(router: Router, bridge: Bridge) -> Rate:
    """Return the tokens/s of conversations without HTTP, messages and sessions."""
    first, question = bridge.prompt(({"role": "user", "content": "1+2="},), None), [2, 3, 4, 1, 2]

    async def conversation(number: int) -> None:
        prompt = Prompt(query_id=str(number), index=number, task="t", text="", token_ids=np.array(first), solutions=())
        sample = TrajectoryBuilder(prompt, number=0)
        for turn in range(NUM_TURNS):
            request = sample.request(_sampling(number, turn), seed=2)
            sample.sampled(await router.generate(request)).observed(question)

    return await _rate(conversation)


async def _through_sessions(router: Router, bridge: Bridge) -> Rate:
    """Return the tokens/s of the same through the session server."""
    server = SessionServer()
    await server.start()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        rate = await _rate(lambda number: _talk(http, server, bridge, router, number))
    await server.close()
    return rate


async def _talk(
    http: aiohttp.ClientSession, server: SessionServer, bridge: Bridge, sampler: Sampler, number: int
) -> list[float]:
    """Have a conversation as a client of the session server; return the seconds of its calls."""
    key, empty, seconds = f"key{number}", np.array([2], np.int32), []
    prompt = Prompt(query_id=key, index=number, task="t", text="", token_ids=empty, solutions=())
    limits = Limits(sampling=SAMPLING, context_tokens=1000)
    server.open(key, Session(bridge, sampler, prompt, number=0, seed=3, limits=limits))
    messages = [{"role": "user", "content": "1+2="}]
    headers = {"Authorization": f"Bearer {key}"}
    for turn in range(NUM_TURNS):
        body = {"model": "policy", "messages": messages, "max_tokens": _length(number, turn)}
        began = time.perf_counter()
        async with http.post(f"{server.url}/v1/chat/completions", json=body, headers=headers) as response:
            response.raise_for_status()
            answer = await response.json()
        seconds.append(time.perf_counter() - began)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "3+4="}]
    await server.end(key)
    return seconds


class _Waits:
    """A generator that answers after ANSWER_SECONDS, and notes how long it took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        began = time.perf_counter()
        await asyncio.sleep(ANSWER_SECONDS)
        ids = np.full(request.sampling.max_new_tokens, 2, np.int32)
        zeros = np.zeros(len(ids))
        self.seconds.append(time.perf_counter() - began)
        return Completion(
            token_ids=ids, logprobs=zeros.astype(np.float32), versions=zeros.astype(np.int32), finish_reason="length"
        )


async def _added_by_sessions(bridge: Bridge) -> list[float]:
    """Return the milliseconds that the session server adds to each call."""
    server = SessionServer()
    await server.start()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def talk(number: int) -> list[float]:
            await asyncio.sleep(number * ANSWER_SECONDS / SESSIONS)
            waits = _Waits()
            seconds = await _talk(http, server, bridge, waits, number)
            return [1000.0 * (all_of_it - waited) for all_of_it, waited in zip(seconds, waits.seconds, strict=True)]

        added = await asyncio.gather(*map(talk, range(SESSIONS)))
    await server.close()
    return [one for of_session in added for one in of_session]


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.02)


async def _rate(conversation: Callable[[int], Awaitable[object]]) -> Rate:
    """Return the tokens/s of conversations, each of which makes place for the next."""
    numbers = iter(range(MEASURED))

    async def one_after_the_other() -> None:
        for number in numbers:
            await conversation(number)

    clock = _Clock()
    await asyncio.gather(*(one_after_the_other() for _ in range(CONVERSATIONS)))
    return clock.rate(sum(_length(number, turn) for number in range(MEASURED) for turn in range(NUM_TURNS)))
