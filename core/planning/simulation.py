"""A run on a virtual clock: admission, selection and router are those of a run, servers and trainer are times.

A server decodes all its requests at once, one token of each in a step whose time grows with their number. A group of
answers is one request to the router, which keeps groups together anyway. Invariant: no thread, no host time: the same
input gives the same run.
"""

import asyncio
import heapq
import itertools
import logging
import math
import random
import selectors
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from core.planning.rates import (
    Calibration,
    Lengths,
    StepTime,
    decoding,
    most_running,
    prefill_seconds,
    step_time,
)
from core.planning.scene import Scene
from rollout.experience import Episode, Lessee, MemoryExperience, Rules, Tags, make_rules
from rollout.inference.backend import GeneratorConfig
from rollout.inference.router import Router, requests_at_once
from rollout.types import Completion, GenerateRequest, Health, SamplingParams

LAST_STEPS = 3
"""Of a run, whose groups of answers are kept for a picture."""
_FORECAST_ANSWERS, _FEWEST_STEPS, _MOST_STEPS = 12_000, 6, 24
"""Of the steps that a forecast measures. It has no answer older than the last of them."""
_ENOUGH_ANSWERS, _ENOUGH_STALENESS = 1024, 8
"""Of a step, for the longest of them; with a larger max_staleness than that, which hides them, fewer."""
_EVEN = 1.1
"""A step that takes longer than its longer side, by this factor, waits for both."""
_FAULT_STEPS = 200
"""Most of a run with a fault: enough for its mean."""
_PREFILL_STEPS = 2.5  # decode steps that a prefill takes beside its tokens: it has no CUDA graph, as was measured
_HEALTH_SECONDS = 1e9  # a server that is lost is found by its failed requests
_GONE = "the server is gone"
Drawn = Callable[[int], Sequence[float]]
"""Returns the lengths of the answers to a prompt by its number in the run."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What a simulated run consists of. Times in seconds."""

    num_servers: int
    max_running: int
    """generator.max_running."""
    step_seconds: Sequence[float]
    """Of a decode step of requests that have their prompts alone, by their number, from 0 to as many as the cache
    holds."""
    token_seconds: float = 0.0
    """More for each token that they have got: its keys and values are read in each step."""
    prefill_seconds: float
    """Of the prompt of a group."""
    prompts: int
    """Of a training step."""
    group_size: int
    answers: Lengths
    prompt_tokens: float
    max_staleness: int
    train_token_seconds: float
    """Of the update and the passes before it, for each trained token."""
    push_seconds: float
    shares_gpus: bool = False
    """Servers stop while the trainer computes."""
    turn_seconds: float = 0.0
    """Colocated: memory changes sides twice a step."""
    resume_seconds: float = 0.0
    """Colocated: of each running request, whose tokens so far are computed again after an update."""
    dead_server_at: int | None = None
    """Step in which a server fails for good."""
    straggler: float = 1.0
    """Factor of the times of one server."""
    tool_seconds: float = 0.0
    """Mean of what tools take in each answer, exponentially distributed; the server decodes others meanwhile."""

    @property
    def slots(self) -> int:
        """Requests that a server decodes at once: as many as it may and its cache holds; others wait there."""
        return min(self.max_running, len(self.step_seconds) - 1)

    @property
    def first_steps(self) -> int:
        """In these the buffer fills."""
        return 2 * self.max_staleness + 2


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one training step came to."""

    begin: float
    taken: float
    """When its episodes were there."""
    trained: float
    end: float
    tokens: float
    staleness: Mapping[int, int]
    """Answers by age in versions."""
    running: float
    """Requests that a server decodes on average."""
    waiting: int
    """Requests that wait at servers, at its end."""
    ready: int
    """Finished episodes that no step has taken."""

    @property
    def mean_staleness(self) -> float:
        return mean_of(self.staleness)


def mean_of(counts: Mapping[int, float]) -> float:
    """Return the mean of values of which there are so many each; 0 of none."""
    return sum(value * count for value, count in counts.items()) / max(1, sum(counts.values()))


@dataclass
class GroupTime:
    """When a server had the answers to a prompt."""

    server: int
    begin: float
    end: float = math.inf


@dataclass
class Outcome:
    """A simulated run."""

    world: World
    steps: list[Step] = field(default_factory=list)
    groups: list[GroupTime] = field(default_factory=list)
    """Of the last steps, those under way too, by their begin."""
    queued: float = -math.inf
    """When a request has last waited at a server for others to end."""

    def add(self, step: Step) -> None:
        """Add a step, and forget the groups that ended before the last ones."""
        self.steps.append(step)
        begin = self.steps[-LAST_STEPS:][0].begin
        self.groups = [group for group in self.groups if group.end > begin]

    @property
    def measured(self) -> list[Step]:
        """The steps after the first ones, in which the buffer fills."""
        return self.steps[min(len(self.steps) // 2, self.world.first_steps) :]

    @property
    def measured_seconds(self) -> float:
        """Of all measured steps."""
        return self.measured[-1].end - self.measured[0].begin

    @property
    def is_queued(self) -> bool:
        """Whether requests wait at a server in the measured steps."""
        return self.queued >= self.measured[0].begin

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.measured_seconds / len(self.measured)

    @property
    def tokens_per_second(self) -> float:
        return sum(s.tokens for s in self.measured) / self.measured_seconds

    @property
    def trainer_share(self) -> float:
        """Share of the time in which the trainer computes: not in which memory changes sides."""
        return sum(s.tokens for s in self.measured) * self.world.train_token_seconds / self.measured_seconds

    @property
    def wait(self) -> float:
        """Seconds of a step in which the trainer waits for answers."""
        return sum(s.taken - s.begin for s in self.measured) / len(self.measured)

    @property
    def slots_share(self) -> float:
        """Share of generator.max_running that is decoded on average."""
        return self.mean_running / self.world.max_running

    @property
    def mean_staleness(self) -> float:
        return mean_of(self.staleness)

    @property
    def staleness(self) -> dict[int, float]:
        """Share of the answers of the measured steps by age in versions."""
        counts = sum((Counter(s.staleness) for s in self.measured), Counter[int]())
        return {age: count / counts.total() for age, count in sorted(counts.items())}

    @property
    def mean_running(self) -> float:
        """Requests that a server decodes on average."""
        return sum(s.running * (s.end - s.begin) for s in self.measured) / self.measured_seconds

    def as_json(self) -> dict[str, object]:
        """Return figures of the run, and of each step, as plain values."""
        names = (
            "tokens_per_second",
            "seconds",
            "wait",
            "trainer_share",
            "slots_share",
            "mean_running",
            "mean_staleness",
        )
        steps = [vars(step) | {"staleness": dict(step.staleness)} for step in self.steps]
        return {name: getattr(self, name) for name in names} | {"staleness": self.staleness, "steps": steps}


class _Server:
    """A server as the router sees it: decodes the answers of groups."""

    def __init__(
        self,
        world: World,
        outcome: Outcome,
        number: int,
        lengths: Mapping[str, Sequence[float]],
        on_answer: Callable[[], bool],
    ) -> None:
        """`lengths`: of the answers of a group, by its request. `on_answer` is called when one of them ends, and
        returns whether that woke a task."""
        factor = 1.0 if number else world.straggler
        self._most, self._outcome, self._index = world.slots, outcome, number
        self._lengths, self._on_answer = lengths, on_answer
        self._steps = [seconds * factor for seconds in world.step_seconds]
        self._token_seconds = world.token_seconds * factor
        self._prefill = world.prefill_seconds * factor
        self._resume = world.resume_seconds * factor
        self._tokens = 0.0  # that each request got since the begin, as long as it was there
        self._began = 0.0  # the sum of that number at the begin of each running request
        self._since = 0.0
        self._running: list[tuple[float, int, float, _Group]] = []  # its value at the end, and at the begin
        self.waiting: deque[tuple[float, _Group]] = deque()
        self._number = 0
        self._clock = virtual_clock()
        self._filling: asyncio.Handle | None = None
        self._is_dead = False
        self.request_seconds = 0.0

    async def generate(self, request: GenerateRequest) -> Completion:
        if self._is_dead:
            raise ConnectionError(_GONE)
        lengths = self._lengths[request.request_id]
        self._outcome.groups.append(time := GroupTime(self._index, self._clock.now))
        group = _Group(len(lengths))
        self.waiting.extend((length, group) for length in lengths)
        if self._filling is None:  # with those that come at the same moment
            self._filling = asyncio.get_running_loop().call_soon(self._fill)
        try:
            await group.done
        except asyncio.CancelledError:
            group.cancelled = True
            raise
        finally:
            time.end = self._clock.now
        return _EMPTY

    async def partial(self) -> Mapping[str, Completion]:
        return {}

    async def health(self) -> Health:
        if self._is_dead:
            raise ConnectionError(_GONE)
        return Health(version=0, num_running=len(self._running), num_waiting=len(self.waiting))

    async def close(self) -> None: ...

    def fail(self) -> None:
        """End every request with an error, for good."""
        self._is_dead = True
        self._clock.call(self, math.inf)
        groups = [group for *_, group in self._running] + [group for _, group in self.waiting]
        for group in groups:
            if not group.done.done():
                group.done.set_exception(ConnectionError(_GONE))
        self._running, self.waiting, self._began = [], deque(), 0.0

    def stall(self, seconds: float) -> None:
        """Decode nothing for a while: a prefill, or a weight update."""
        self.advance()
        self._pass(seconds)
        self._schedule()

    def leave(self, seconds: float) -> None:
        """Stop for as long as the trainer has the GPU, and then take up the running requests again."""
        self.advance()
        self._since += seconds
        self._pass(len(self._running) * self._resume)
        self._schedule()

    def advance(self) -> None:
        """Bring what the requests have up to now."""
        if (elapsed := self._clock.now - self._since) > 0:
            step, growth = self._step()
            self._tokens += 2 * elapsed / (step + math.sqrt(step**2 + 2 * growth * elapsed))
            self._pass(elapsed)

    def _pass(self, seconds: float) -> None:
        self._since += seconds
        self.request_seconds += seconds * len(self._running)

    def _step(self) -> tuple[float, float]:
        """Return the seconds of the next decode step, and by how much more each further one takes."""
        running = len(self._running)
        tokens = running * self._tokens - self._began
        return self._steps[running] + self._token_seconds * tokens, self._token_seconds * running

    def _fill(self) -> None:
        """Let waiting requests begin in one prefill. While the server is nearly full, they wait until a tenth of its
        places is free."""
        self._filling = None
        if self.waiting and len(self._running) <= 0.9 * self._most:
            self.advance()
            groups = set()
            while self.waiting and len(self._running) < self._most:
                length, group = self.waiting.popleft()
                if not group.cancelled:
                    self._number += 1
                    groups.add(id(group))
                    heapq.heappush(self._running, (self._tokens + length, self._number, self._tokens, group))
                    self._began += self._tokens
            self._pass(_PREFILL_STEPS * self._steps[0] + self._prefill * len(groups))
        if self.waiting:
            self._outcome.queued = self._clock.now
        self._schedule()

    def _schedule(self) -> None:
        """Call finish() when the next answer ends."""
        end = math.inf
        if self._running:
            (step, growth), left = self._step(), max(0.0, self._running[0][0] - self._tokens)
            end = self._since + left * (step + growth * left / 2)
        self._clock.call(self, end)

    def finish(self) -> bool:
        """End the answers that are complete, and let others begin; return whether that woke a task."""
        self.advance()
        running, ended, woke = self._running, self._tokens + 0.5, False
        while running and running[0][0] <= ended:
            _, _, began, group = heapq.heappop(running)
            self._began -= began
            group.left -= 1
            if not group.left and not group.done.done():
                group.done.set_result(None)
                woke = True
            woke |= self._on_answer()
        self._fill()
        return woke


class _Group:
    """The answers to one prompt, on their server."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.cancelled = False


_EMPTY = Completion(
    token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), versions=np.zeros(0, np.int32),
    finish_reason="stop",
)  # fmt: skip


LONGEST_ANSWERS = "longest answers"
"""One of Forecast.limited_by."""


@dataclass(frozen=True, kw_only=True)
class Forecast(StepTime):
    """A step as it is on average in a simulated run."""

    wait: float
    """Seconds in which the trainer waits for answers."""
    trainer_share: float
    """Share of the time in which the trainer computes."""
    slots_share: float
    """Share of generator.max_running that is decoded on average."""
    staleness: Mapping[int, float]
    """Share of the answers by age in versions."""
    takes_turns: bool
    """No answer is sampled while the trainer computes."""
    is_queued: bool
    """Requests wait at a server until others end."""

    @property
    def limited_by(self) -> str:
        """The slower side, or the longest answers where both sides wait for them."""
        if self.step > _EVEN * max(self.rollout, self.trainer) and not self.takes_turns:
            return LONGEST_ANSWERS
        return "generators" if self.rollout > self.trainer else "trainer"


def forecast(scene: Scene, calibration: Calibration, answers: Lengths) -> Forecast | None:
    """Return the average of simulated steps; None where there is no world. Of a run with many answers a step, an equal
    part of servers and batch is simulated. No answer is simulated as older than 24 versions."""
    time = step_time(scene, calibration, answers)
    if time is None:
        return None
    if scene.servers is None:
        return Forecast(
            **vars(time),
            wait=0.0,
            trainer_share=1.0,
            slots_share=0.0,
            staleness={0: 1.0},
            takes_turns=True,
            is_queued=False,
        )
    if (world := _world(scene, calibration, answers, time)) is None:
        return None
    world = replace(world, max_staleness=min(world.max_staleness, _MOST_STEPS))
    parts = _parts(world)
    if parts > 1:
        world = replace(
            world, num_servers=world.num_servers // parts, prompts=world.prompts // parts,
            train_token_seconds=world.train_token_seconds * parts,
        )  # fmt: skip
    steps = min(_MOST_STEPS, max(_FEWEST_STEPS, _FORECAST_ANSWERS // (world.prompts * world.group_size)))
    run = simulate(world, world.first_steps + steps)
    return Forecast(
        **vars(time) | {"step": time.tokens / parts / run.tokens_per_second},
        wait=run.wait, trainer_share=run.trainer_share, slots_share=run.slots_share,
        staleness=run.staleness, takes_turns=scene.shares_gpus or scene.max_staleness == 0,
        is_queued=run.is_queued,
    )  # fmt: skip


def _parts(world: World) -> int:
    """Return in how many equal parts servers and batch of a world are divided, each with enough answers a step."""
    enough = _ENOUGH_ANSWERS * _ENOUGH_STALENESS // max(_ENOUGH_STALENESS, world.max_staleness)
    most = world.prompts * world.group_size // max(1, enough)
    common = math.gcd(world.num_servers, world.prompts)
    return max(n for n in range(1, max(1, most) + 1) if common % n == 0)


def world_of(scene: Scene, calibration: Calibration, answers: Lengths) -> World | None:
    """Return the world of a scene; None without generators that hold the model, or times."""
    time = step_time(scene, calibration, answers)
    return None if time is None else _world(scene, calibration, answers, time)


def _world(scene: Scene, calibration: Calibration, answers: Lengths, time: StepTime) -> World | None:
    if (servers := scene.servers) is None:
        return None
    most, prompt = most_running(scene, servers, answers), scene.prompt_tokens / 2
    if not most:
        return None
    decode = decoding(servers, calibration)
    steps = [decode(n, prompt) for n in range(most + 1)]
    return World(
        num_servers=servers.layout.dp, max_running=servers.max_running, step_seconds=steps,
        token_seconds=decode(1, prompt + 1) - decode(1, prompt),
        prompts=scene.prompts, group_size=scene.group_size, answers=answers,
        prefill_seconds=prefill_seconds(
            servers, calibration, prompts=1, length=prompt, answers=scene.group_size
        ),
        prompt_tokens=prompt, max_staleness=scene.max_staleness,
        train_token_seconds=time.trainer / time.tokens, push_seconds=time.push, shares_gpus=scene.shares_gpus,
        turn_seconds=time.turn, resume_seconds=prefill_seconds(
            servers, calibration, prompts=1, length=prompt + answers.mean_begun, answers=1
        ),
    )  # fmt: skip


def simulate_with_faults(world: World, num_steps: int) -> dict[str, Outcome]:
    """Return so many steps as planned first, and as many, at most 200, with each thing that may happen to a run."""
    fewer = min(num_steps, _FAULT_STEPS)
    third = fewer // 3
    spread = world.answers.spread + 0.4
    step = world.step_seconds[world.slots] + world.token_seconds * world.slots * world.answers.mean_begun
    slow = 0.2 * world.answers.mean * step
    cases: dict[str, World] = {}
    if world.num_servers > 1:
        cases[f"a server fails in step {third}"] = replace(world, dead_server_at=third)
        cases["a server at half speed"] = replace(world, straggler=2.0)
    cases[f"a longer tail: spread {spread:.1f}"] = replace(world, answers=replace(world.answers, spread=spread))
    digits = ".1f" if slow >= 1 else ".2g"
    cases[f"tools of {slow:{digits}} s in each answer"] = replace(world, tool_seconds=slow)
    runs = {name: simulate(case, fewer) for name, case in cases.items()}
    return {"as planned": simulate(world, num_steps), **runs}


def simulate(world: World, num_steps: int, *, seed: int = 0, drawn: Drawn | None = None) -> Outcome:
    """Run so many training steps. `drawn`: the lengths of answers, where they are known. The router does not log its
    faults: they are those of the simulation."""
    logger = logging.getLogger(Router.__module__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        return run_virtual(_Run(world, num_steps, seed, drawn).run())
    finally:
        logger.setLevel(level)


class _Run:
    def __init__(self, world: World, num_steps: int, seed: int, drawn: Drawn | None) -> None:
        self._world, self._num_steps = world, num_steps
        # The run goes on after the last step: those that it would train on then are sampled beside it.
        self._num_prompts = world.prompts * (num_steps + world.max_staleness + 1)
        self._random = random.Random(seed)
        self._drawn = drawn or self._draw
        self._sampling = SamplingParams(max_new_tokens=world.answers.longest)
        self._rules: Rules = make_rules(
            num_prompts=self._num_prompts, batch_size=world.prompts, max_staleness=world.max_staleness,
            num_epochs=1,
        )  # fmt: skip
        self._experience = MemoryExperience()
        self._version = self._opened = self._requests = 0
        self._is_full = False  # until the next version: a lease leaves room for no more
        self._most = requests_at_once(
            max_running=world.max_running, num_generators=world.num_servers, group_size=world.group_size
        )
        self._outcome = Outcome(world=world)
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokens: dict[str, float] = {}
        self._lengths: dict[str, list[float]] = {}  # of the answers under way, by episode
        self._request_seconds = 0.0

    async def run(self) -> Outcome:
        world = self._world
        self._servers = [
            _Server(world, self._outcome, i, self._lengths, self._end_answer) for i in range(world.num_servers)
        ]
        checks = GeneratorConfig(
            health_interval_seconds=_HEALTH_SECONDS, health_timeout_seconds=60.0, patience_seconds=0.0
        )
        self._router = Router(self._servers, checks)
        lessee, loop = Lessee(self._experience, self._rules), asyncio.get_running_loop()
        self._start()
        for step in range(self._num_steps):
            if step == world.dead_server_at:
                self._servers[-1].fail()
            begin = loop.time()
            episodes = await lessee.take(step)
            taken = loop.time()
            tokens = sum(self._tokens.pop(episode.tags.id) for episode in episodes)
            seconds = tokens * world.train_token_seconds + world.turn_seconds
            if world.shares_gpus:
                for server in self._servers:
                    server.leave(seconds)
            await asyncio.sleep(seconds)
            trained = loop.time()
            for server in self._servers:
                server.stall(world.push_seconds)
            await asyncio.sleep(world.push_seconds)
            lessee.trained(step + 1)
            self._version, self._is_full = self._version + 1, False
            running = self._mean_running(loop.time() - begin)
            ages = Counter(step - oldest for episode in episodes for oldest in episode.tags.oldest)
            self._outcome.add(
                Step(
                    begin=begin,
                    taken=taken,
                    trained=trained,
                    end=loop.time(),
                    tokens=tokens,
                    staleness=ages,
                    running=running,
                    waiting=sum(len(s.waiting) for s in self._servers),
                    ready=self._experience.status().num_ready,
                )
            )
            self._start()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._router.close()
        return self._outcome

    def _mean_running(self, seconds: float) -> float:
        """Return the requests that a server decoded on average since the last call."""
        for server in self._servers:
            server.advance()
        total = sum(server.request_seconds for server in self._servers)
        since, self._request_seconds = total - self._request_seconds, total
        return since / max(seconds, 1e-9) / len(self._servers)

    def _start(self) -> bool:
        """Start prompts as the producer of a run does: while the generators have room and admission allows it. Return
        whether one was started."""
        before = self._opened
        while not self._is_full and self._requests < self._most and self._opened < self._num_prompts:
            id = str(self._opened)
            tags = Tags(id=id, group_id=id, task="", row=id, epoch=0, version=self._version)
            if self._experience.open(tags, self._rules.admission) == "full":
                self._is_full = True
                break
            self._opened += 1
            self._requests += self._world.group_size
            task = asyncio.create_task(self._episode(tags))
            self._tasks.add(task)
            task.add_done_callback(self._end_task)
        return self._opened > before

    async def _episode(self, tags: Tags) -> None:
        world = self._world
        lengths = self._lengths[tags.id] = list(self._drawn(int(tags.id)))
        request = GenerateRequest(request_id=tags.id, prompt_ids=(), sampling=self._sampling, group_id=tags.id)
        await self._router.generate(request)
        if world.tool_seconds:
            await asyncio.sleep(max(self._random.expovariate(1 / world.tool_seconds) for _ in lengths))
        del self._lengths[tags.id]
        self._tokens[tags.id] = sum(lengths) + world.prompt_tokens * len(lengths)
        ready = replace(
            tags,
            rewards=[0.0] * len(lengths),
            lengths=[round(n) for n in lengths],
            trained=[1] * len(lengths),
            oldest=[tags.version] * len(lengths),
        )
        self._experience.put(Episode(tags=ready, trajectories=()))

    def _draw(self, number: int) -> list[float]:
        return [self._world.answers.of_normal(self._random.gauss(0.0, 1.0)) for _ in range(self._world.group_size)]

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._experience.fail(error)

    def _end_answer(self) -> bool:
        self._requests -= 1
        return self._start()


T = TypeVar("T")


class _Clock(selectors.SelectSelector):
    """A virtual clock. It moves to the next timer of its loop, or before that to the next end of an answer. As timers
    of the loop, these ends would take a fifth of the time of a simulation."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._calls: list[tuple[float, int, _Server]] = []
        self._numbers = itertools.count()
        self._valid: dict[_Server, int] = {}  # number of the last call of each server

    def call(self, server: "_Server", when: float) -> None:
        """Call finish() of a server then, and not when it was to be called before; infinity: do not call it."""
        self._valid[server] = number = next(self._numbers)
        if when < math.inf:
            heapq.heappush(self._calls, (when, number, server))

    def select(self, timeout: float | None = None) -> list[Any]:
        end, calls = math.inf if timeout is None else self.now + max(timeout, 0.0), self._calls
        while calls and calls[0][0] < end:
            when, number, server = heapq.heappop(calls)
            if self._valid[server] == number:
                self.now = max(self.now, when)
                if server.finish():
                    return []
        if timeout is None:
            raise RuntimeError("deadlock: every task waits and no timer is set")
        self.now = end
        return []


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """A loop on a virtual clock, which begins at 0."""

    def __init__(self) -> None:
        self.clock = _Clock()
        super().__init__(self.clock)
        # asyncio runs what is due until time() plus this, which must not vanish in the digits of months.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self.clock.now


def virtual_clock() -> _Clock:
    """Return the clock of the loop that runs, which is a virtual one."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockLoop), "run_virtual() has started it"
    return loop.clock


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, as asyncio.run() does, on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
