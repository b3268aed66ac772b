"""The best allocations of a number of GPUs that fit in memory and pass the checks of a run, and the keys that they set
for allocation_mode=search.

Invariant: what is proposed has been resolved and checked by the rules that the start of a run applies.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from allocation import GENERATOR_ROLE, GPU, AllocationError, ParallelLayout
from allocation.resolve import REST, Spec, parse_spec
from core.config.load import LoadedConfig
from core.config.parsing.problems import ConfigError, Problem
from core.placement.rules import split_errors
from core.planning.advice import (
    NODE_GPUS,
    divides,
    gib,
    keys_of_engines,
    layout_errors,
    mode_of,
    needed_gpus,
    smallest_trainer,
    trainer_layouts,
    with_microbatches,
    with_worst_routing,
)
from core.planning.memory import MemoryPlan, plan_memory, smallest_total
from core.planning.rates import Calibration, Lengths, StepTime, calibration_of, step_time, trainer_seconds
from core.planning.scene import PlanError, Scene, Servers, gpu_of_machine, scene_of
from core.planning.server_memory import GIB, plan_servers
from core.planning.simulation import LONGEST_ANSWERS, Forecast, forecast
from mcore_adapter.settings import Level
from rollout.inference.registry import DEFAULT_BACKEND

Metric = Literal["tokens", "cost", "latency"]
"""tokens: most trained tokens per second. cost: most of them for each GPU, also with fewer GPUs. latency: the shortest
time from the begin of an answer to the end of the last step that may train on it."""
METRICS: tuple[Metric, ...] = get_args(Metric)
_LEVELS: tuple[Level, ...] = ("none", "selective", "linear", "full")
_MICROBATCHES = (1, 0.5, 2, 4)
"""Of the tokens that the configuration gives them."""
_RUNNING = (1024, 768, 512, 384, 256, 192, 128, 64, 32)
_NEARLY = 0.9
"""Of the speed by the formula; the fewest requests at once that reach it are simulated first. With many, servers wait
for their own processor and each answer takes longer (benchmarks/planner.md, Search)."""
_CLEARLY = 0.98
"""Of the seconds: what is not even so much faster is not worth more requests, or other microbatches."""
_AT_LEAST = 0.94
"""Of the seconds of a step by the formula: a simulated one does not take less."""
_MOST_CHECKED = 400
_MORE = 3
"""How many are simulated at most beyond those that are returned."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """An allocation, with what else it sets: recomputation, microbatches, requests of servers, staleness."""

    scene: Scene
    asked: Scene
    """The configuration: only what differs from it is set."""
    time: Forecast
    memory: MemoryPlan

    @property
    def num_gpus(self) -> int:
        return self.scene.n_nodes * self.scene.n_gpus_per_node

    @property
    def latency(self) -> float:
        return latency_of(self.scene, self.time)

    @property
    def mode(self) -> str:
        """allocation_mode."""
        return mode_of(self.scene)

    @property
    def overrides(self) -> tuple[str, ...]:
        """Keys to set, as on the command line."""
        return _overrides(self.scene, self.asked)

    @property
    def lines(self) -> tuple[str, str]:
        """Speed and what limits it, and memory."""
        t, servers = self.time, self.memory.servers
        sides = f"update {t.update:.1f}, log-probabilities {t.passes:.1f}, generation {t.rollout:.1f} s"
        speed = (
            f"{t.tokens_per_second:,.0f} trained tokens/s: a step takes {t.step:.1f} s ({sides}), limited by the "
            f"{t.limited_by}"
        )
        spare = (self.memory.limit - self.memory.peak.total) / GIB
        level = "no" if self.scene.actor.recompute == "none" else self.scene.actor.recompute
        memory = f"trainer: {spare:.0f} GiB of a GPU are free, {level} recomputation"
        if servers is not None and self.scene.servers is not None:
            running = self.scene.servers.max_running
            memory += f"; servers: {running} requests at once, a cache of {servers.tokens:,} tokens"
        memory += f"; {gib(self.memory.host_total)} GiB of host memory a node"
        if worst := with_worst_routing(self.scene):
            missing = plan_memory(worst).peak.total - self.memory.limit
            memory += f"; with the worst routing {gib(missing)} GiB are missing" if missing > 0 else ""
        return speed, memory

    def why_not(self, best: Proposal, metric: Metric) -> str:
        """Return why it is worse than another one."""
        mine, other = self.time, best.time
        if metric == "latency":
            return f"{self.latency:.0f} instead of {best.latency:.0f} s from answer to update"
        ratio = mine.tokens_per_second / other.tokens_per_second
        slower, of_gpus, mine_of, other_of = f"{ratio - 1:+.0%} tokens/s", "s", 1, 1
        if metric == "cost":
            slower = f"{ratio * best.num_gpus / self.num_gpus - 1:+.0%} tokens/s of a GPU"
            of_gpus, mine_of, other_of = "s of all GPUs together", self.num_gpus, best.num_gpus
        if self.scene.shares_gpus and not best.scene.shares_gpus:
            return f"{slower}: generation and update take turns, {mine.step - mine.trainer:.1f} + {mine.trainer:.1f} s"
        if mine.limited_by == LONGEST_ANSWERS:
            return f"{slower}: a step waits {mine.wait:.1f} s for the {LONGEST_ANSWERS}"
        parts = {
            "generation": (mine_of * mine.rollout, other_of * other.rollout),
            "update and log-probabilities": (mine_of * mine.trainer, other_of * other.trainer),
        }
        name, (took, takes) = max(parts.items(), key=lambda part: part[1][0] - part[1][1])
        return f"{slower}: {name} {took:.1f} instead of {takes:.1f} {of_gpus}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search has found."""

    best: Sequence[Proposal]
    """They differ in the GPUs of the trainer or in the servers."""
    others: Sequence[Proposal]
    """The next ones."""
    num_considered: int


def search(
    scene: Scene,
    calibration: Calibration,
    answers: Lengths,
    *,
    num_gpus: int,
    accepts: Callable[[Scene, Sequence[str]], bool],
    metric: Metric = "tokens",
    fixed: Spec | None = None,
    most: int = 3,
    num_others: int = 2,
) -> Found:
    """Return the best allocations of `num_gpus` GPUs, or with metric="cost" of at most so many: a formula chooses which
    ones are simulated. `accepts`: whether a run would start with an allocation, set by these keys. `fixed`: what the
    user has decided. Raises PlanError for a number that equal nodes cannot have, AllocationError for layouts that
    cannot be."""
    placed = {num_gpus: _on(scene, num_gpus)}
    size = num_gpus
    while metric == "cost" and size % 2 == 0:
        size //= 2
        with suppress(PlanError):  # half a node would be left
            placed[size] = _on(scene, size)
    if fixed is not None:
        _check_fixed(scene, [*placed], fixed)
    splits = [split for sized in placed.values() for split in _splits(sized, calibration, answers, fixed)]
    order = itertools.count()
    heap: list[tuple[float, float, int, Scene, StepTime, Iterator[Scene]]] = []

    def add(alternatives: Iterator[Scene]) -> None:
        """Add the first alternative that has a time."""
        for one in alternatives:
            if timed := _with_requests(one, calibration, answers):
                heapq.heappush(heap, (_cost(metric, *timed), timed[1].trainer, next(order), *timed, alternatives))
                return

    def proposed(candidate: Scene) -> Proposal | None:
        memory = plan_memory(candidate)
        if not memory.fits or not accepts(candidate, _overrides(candidate, scene)):
            return None
        time = forecast(candidate, calibration, answers)
        assert time is not None, "it has a time by the formula"
        return Proposal(scene=candidate, asked=scene, time=time, memory=memory)

    def cost(one: Proposal) -> float:
        return _cost(metric, one.scene, one.time)

    for split in splits:
        add(split.alternatives)
    found: list[Proposal] = []
    for _ in range(_MOST_CHECKED):
        if not heap or len(found) == most + num_others + _MORE:
            break
        *_, candidate, time, alternatives = heapq.heappop(heap)
        fastest = replace(time, step=_AT_LEAST * time.step)
        if len(found) >= most + num_others and _cost(metric, candidate, fastest) > sorted(map(cost, found))[most - 1]:
            break
        if any(_split(candidate) == _split(one.scene) for one in found):
            continue
        if proposal := proposed(candidate):
            found.append(proposal)
        else:
            add(alternatives)
    found.sort(key=cost)
    best = []
    for proposal in found[:most]:  # with more requests at once, while that is faster by far
        while (more := _with_more_requests(proposal, answers)) and (next_one := proposed(more)):
            if next_one.time.step > _CLEARLY * proposal.time.step:
                break
            proposal = next_one
        best.append(proposal)
    return Found(
        best=sorted(best, key=cost), others=found[most : most + num_others],
        num_considered=sum(split.num_layouts for split in splits),
    )  # fmt: skip


def _overrides(scene: Scene, asked: Scene) -> tuple[str, ...]:
    """Return the keys that make a run of `scene` from one of `asked`."""
    servers = scene.servers
    assert servers is not None and asked.servers is not None, "a search has generators"
    keys = [f"allocation_mode={mode_of(scene)}", f"n_nodes={scene.n_nodes}", f"n_gpus_per_node={scene.n_gpus_per_node}"]
    keys += keys_of_engines(scene, asked, with_level=True)
    if servers.max_running != asked.servers.max_running:
        keys.append(f"generator.max_running={servers.max_running}")
    if scene.max_staleness != asked.max_staleness:
        keys.append(f"staleness.max_staleness={scene.max_staleness}")
    return tuple(keys)


def parse_fixed(text: str) -> Spec:
    """Return what --fix decides: BACKEND.d4m2p1 (servers), d8m1p2 (trainer), or both as in allocation_mode. Raises
    PlanError."""
    try:
        if "+" in text or "|" in text or "." not in text:
            spec = parse_spec(text)
        else:
            spec = replace(parse_spec(f"{text}+d1m1p1"), trainer={})
        if named := spec.trainer.keys() - {REST}:
            raise PlanError(
                f"--fix {text}: names {', '.join(sorted(named))}; a search places all roles of the trainer alike, so "
                "write one layout for them, as d8m1p2"
            )
        if spec.backend not in (None, DEFAULT_BACKEND[GPU]):
            raise PlanError(
                f"--fix {text}: {spec.backend} generates on the CPU, and a search places servers on GPUs; write "
                f"{DEFAULT_BACKEND[GPU]}.{spec.generator}"
            )
        return spec
    except AllocationError as error:
        raise PlanError(
            f"{error.within('--fix', text)}; write {DEFAULT_BACKEND[GPU]}.d4m2p1, d8m1p2, or both"
        ) from None


def nothing_fits(
    scene: Scene, num_gpus: int, find: Callable[..., Found], *, num_considered: int, fixed: Spec | None = None
) -> str:
    """Return why a search found nothing: GPUs for the trainer alone, host memory, or what was fixed. `find`: searches
    again, in a scene and with what is `fixed`. `num_considered`: allocations of the search."""
    smallest = smallest_trainer(scene)
    if smallest is None or smallest.actor.layout.world_size >= num_gpus:
        return needed_gpus(scene, smallest)
    if scene.host_bytes is not None and (best := find(replace(scene, host_bytes=None), fixed=fixed).best):
        needs = f"the fastest allocation needs {gib(best[0].memory.host_total)}"
        less = find(replace(scene, writes_checkpoints=False), fixed=fixed).best
        way = "set recover_mode=disabled, which takes less" if less else "use nodes with more"
        return f"{gib(scene.host_bytes)} GiB of host memory a node are too few: {needs}; {way}."
    if fixed is not None and find(scene).best:
        if num_considered:
            return "No allocation with the layout of --fix fits in memory; leave out --fix."
        return "No layout beside that of --fix divides model, batch and the other GPUs; leave out --fix."
    return "No layout divides model, batch and GPUs and leaves room for servers; see ppo.ppo_n_minibatches."


def latency_of(scene: Scene, time: StepTime) -> float:
    """Return the seconds from the begin of an answer to the end of the last step that may train on it."""
    return time.step * (scene.max_staleness + 1)


def _cost(metric: Metric, scene: Scene, time: StepTime) -> float:
    if metric == "latency":
        return latency_of(scene, time)
    return -time.tokens_per_second / (scene.n_nodes * scene.n_gpus_per_node if metric == "cost" else 1)


def _on(scene: Scene, num_gpus: int) -> Scene:
    """Return the scene on so many GPUs, on nodes as the configuration has them. One node of one or two GPUs, the
    default, is taken for a part of a node. Raises PlanError where some GPUs of a node would be left."""
    per_node = scene.n_gpus_per_node
    if scene.n_nodes == 1 and per_node <= 2 and num_gpus > per_node:
        per_node = NODE_GPUS
    per_node = min(per_node, num_gpus)
    if left := num_gpus % per_node:
        below = num_gpus - left
        raise PlanError(
            f"--gpus {num_gpus}: nodes have {per_node} GPUs each (n_gpus_per_node); write {below} or {below + per_node}"
        )
    return replace(scene, n_nodes=num_gpus // per_node, n_gpus_per_node=per_node)


def _split(scene: Scene) -> tuple[int, bool, ParallelLayout | None]:
    """Return what proposals differ in: GPUs of the trainer, and servers."""
    return scene.actor.layout.world_size, scene.shares_gpus, scene.servers.layout if scene.servers else None


@dataclass(frozen=True, kw_only=True)
class _Split:
    """A number of GPUs for the trainer, on GPUs of its own or not, and a layout of the servers."""

    num_layouts: int
    """Of the trainer, which divide models and batch."""
    alternatives: Iterator[Scene]
    """With trainers that fit, the fastest first."""


def _splits(scene: Scene, calibration: Calibration, answers: Lengths, fixed: Spec | None) -> Iterator[_Split]:
    assert scene.servers is not None, "the caller has generators"
    num_gpus = scene.n_nodes * scene.n_gpus_per_node
    wanted = None if fixed is None else fixed.trainer.get(REST)
    served = None if fixed is None else fixed.generator
    sizes = list(_server_sizes(scene, scene.servers)) if served is None else []
    layouts = [layout for layout in trainer_layouts(scene, num_gpus) if wanted is None or layout == wanted]
    for world in sorted({layout.world_size for layout in layouts}):
        rest = num_gpus - world
        if fixed is not None and wanted is not None and served is not None and fixed.disaggregated != (rest > 0):
            continue
        left = rest or num_gpus
        sides = [ParallelLayout(dp=left // tp, tp=tp) for tp in sizes if left % tp == 0]
        if served is not None and served.world_size == left:
            sides = [served]
        sized = [layout for layout in layouts if layout.world_size == world]
        others = scene.servers.num_auxiliary
        if others and not rest:  # servers of the auxiliary model need GPUs of their own
            continue
        for placed in [replace(scene, shares_gpus=False)] if rest else _on_same_gpus(scene):
            trainers = _fitting(placed, sized, calibration, answers)
            for side in sides:
                if side.dp > others:
                    servers = replace(scene.servers, layout=replace(side, dp=side.dp - others))
                    trainers, mine = itertools.tee(trainers)
                    yield _Split(num_layouts=len(sized), alternatives=_with_servers(mine, servers))


def _with_servers(trainers: Iterator[Scene], servers: Servers) -> Iterator[Scene]:
    return (replace(trainer, servers=servers) for trainer in trainers)


def _on_same_gpus(scene: Scene) -> list[Scene]:
    """Return the scene with servers and trainer on the same GPUs: with its staleness, and without any."""
    shared = replace(scene, shares_gpus=True)
    engines = tuple(replace(engine, has_pass=engine.has_pass_in_turns) for engine in scene.engines)
    in_turns = replace(shared, engines=engines, max_staleness=0)
    return [in_turns, shared] if scene.max_staleness else [in_turns]


def _with_requests(scene: Scene, calibration: Calibration, answers: Lengths) -> tuple[Scene, StepTime] | None:
    """Return the scene with the fewest requests at once that are nearly the fastest, of those that the cache of the
    servers holds and that the staleness bound lets begin, and its time; None where there are no times."""
    servers = scene.servers
    assert servers is not None, "the caller has generators"
    allowed = 1.25 * scene.sequences * (scene.max_staleness + 1) / servers.layout.dp
    best: tuple[Scene, StepTime] | None = None
    fastest = math.inf
    for whole in _with_numbers(scene, answers, [running for running in _RUNNING if running < 2 * allowed]):
        time = step_time(whole, calibration, answers)
        if time is None or time.step * _NEARLY > fastest:
            break
        best, fastest = (whole, time), min(fastest, time.step)
    if best is None and (time := step_time(scene, calibration, answers)) is not None:
        best = scene, time
    return best


def _with_more_requests(proposal: Proposal, answers: Lengths) -> Scene | None:
    """Return a proposal with the next larger number of requests at once that the cache holds; None without one, and
    where more would not be faster: none wait, or the trainer alone takes as long."""
    scene, time = proposal.scene, proposal.time
    assert scene.servers is not None, "a proposal has generators"
    if not time.is_queued or time.trainer + time.push > _CLEARLY * time.step:
        return None
    more = [running for running in reversed(_RUNNING) if running > scene.servers.max_running][:1]
    return next(_with_numbers(scene, answers, more), None)


def _with_numbers(scene: Scene, answers: Lengths, numbers: Sequence[int]) -> Iterator[Scene]:
    """Yield the scene with each of these numbers of requests at once that the cache of a server holds."""
    servers = scene.servers
    assert servers is not None, "the caller has generators"
    for running in numbers:
        more = replace(servers, max_running=running)
        if plan_servers(scene, more).tokens >= running * (scene.prompt_tokens / 2 + answers.mean):
            yield replace(scene, servers=more)


def _fitting(
    scene: Scene, layouts: Sequence[ParallelLayout], calibration: Calibration, answers: Lengths
) -> Iterator[Scene]:
    """Yield the scene with trainers that fit in these layouts, the fastest first: with the least recomputation that
    fits, the optimizer in host memory where nothing fits otherwise, and smaller or larger microbatches where these are
    faster by far."""
    given = scene.actor.tokens
    heap: list[tuple[float, int, Scene, Iterator[Scene]]] = []
    order = itertools.count()

    def add(steps: Iterator[Scene]) -> None:
        """Add the next step of recomputation."""
        if (one := next(steps, None)) is not None:
            seconds = sum(trainer_seconds(one, calibration, answers))
            heapq.heappush(heap, (seconds / (1 if one.actor.tokens == given else _CLEARLY), next(order), one, steps))

    for layout in layouts:
        placed = scene.in_layout(layout)
        for sized in dict.fromkeys(with_microbatches(placed, factor) for factor in _MICROBATCHES):
            add(_steps(sized))
    while heap:
        *_, one, steps = heapq.heappop(heap)
        if plan_memory(replace(one, servers=None)).fits:
            yield one
        add(steps)


def _steps(scene: Scene) -> Iterator[Scene]:
    """Yield the scene with more and more recomputation, then with the optimizer in host memory."""
    for offload in (False, True):
        placed = scene.with_engines(offload=offload)
        if smallest_total(replace(placed, servers=None)) <= scene.gpu.gib * GIB:
            for level in _LEVELS:
                yield placed.with_engines(recompute=level)


def _server_sizes(scene: Scene, servers: Servers) -> Iterator[int]:
    """Yield the tensor-parallel ranks of servers that hold the model and several of the longest sequences."""
    for tp in (1, 2, 4, 8):
        if tp > scene.n_gpus_per_node or not divides(servers.config, ParallelLayout(tp=tp), GENERATOR_ROLE):
            continue
        if plan_servers(scene, replace(servers, layout=ParallelLayout(tp=tp))).longest >= 4:
            yield tp


def _check_fixed(scene: Scene, sizes: Sequence[int], fixed: Spec) -> None:
    """Raise PlanError or AllocationError where layouts cannot be on one of these numbers of GPUs, whatever memory these
    have."""
    trainer, served = fixed.trainer.get(REST), fixed.generator
    given = [layout.world_size for layout in (served, trainer) if layout is not None]
    taken = sum(given) if fixed.disaggregated else max(given)
    if taken > sizes[0] or (len(given) > 1 and taken not in sizes):
        raise PlanError(f"--fix: takes {taken} GPUs, and there are {sizes[0]}; write --gpus {taken}, or another layout")
    if len(given) > 1 and not fixed.disaggregated and given[0] != given[1]:
        raise PlanError(
            f"--fix: layouts on the same GPUs (|) take {given[0]} and {given[1]}; write two of one size, or +"
        )
    if served is not None and scene.servers is not None:
        for error in split_errors(served, GENERATOR_ROLE, scene.servers.config, "the actor"):
            raise error.within("--fix", str(served))
    if trainer is not None:
        for error in layout_errors(scene, trainer):
            raise error.within("--fix", str(trainer))


logger = logging.getLogger(__name__)

_PROPOSED = ("engines", "servers", "shares_gpus", "max_staleness", "n_nodes", "n_gpus_per_node")
"""Fields of a scene that the overrides of a proposal set."""

Loader = Callable[[Sequence[str]], LoadedConfig]
"""Loads a configuration with these overrides after its own. Raises ConfigError."""


def searched(load: Loader) -> tuple[str, ...]:
    """Return the overrides of the fastest allocation of the GPUs of a configuration, whose allocation_mode is search.
    Raises ConfigError."""
    try:
        gpu = gpu_of_machine()
        if gpu is None:
            raise PlanError("this machine has no GPU; slipstream plan --search --gpu H100 proposes layouts anywhere")
        scene = scene_of(load([unplaced(load)]).config, gpu)
        calibration = calibration_of(gpu.name)
        if calibration is None:
            raise PlanError(f"no calibration for {gpu.name}; slipstream plan --calibrate measures it")
        num_gpus = scene.n_nodes * scene.n_gpus_per_node
        answers = usual_lengths(scene)
        find = partial(proposals, load, calibration=calibration, answers=answers, num_gpus=num_gpus, most=1)
        found = find(scene)
        if not found.best:
            raise PlanError(
                nothing_fits(scene, num_gpus, partial(find, num_others=0), num_considered=found.num_considered)
            )
    except (PlanError, AllocationError) as error:
        message = f"search: {error}; or write the layouts, or heuristic"
        raise ConfigError([Problem(key="allocation_mode", message=message)]) from None
    best = found.best[0]
    logger.info("allocation_mode=search: %s; %s", " ".join(best.overrides), best.lines[0])
    return best.overrides


def unplaced(load: Loader) -> str:
    """Return an allocation_mode for a search to begin with, which suits any batch. Raises PlanError for a run without
    servers."""
    config = load(["allocation_mode=heuristic"]).config
    if config.TRAINER_ONLY:
        raise PlanError("this experiment has no servers, and nothing to search for")
    others = config.num_slots - 1
    side = f"allocation_mode={DEFAULT_BACKEND[GPU]}.d{max(1, others)}m1p1"
    return f"{side}+d1m1p1" if others else side


def usual_lengths(scene: Scene) -> Lengths:
    """Return the lengths of answers, or of whole sequences without generators, that are assumed where none are given: a
    third of the longest on average."""
    longest = scene.prompt_tokens if scene.servers is None else scene.answer_tokens
    return Lengths(mean=max(1, longest // 3), longest=max(1, longest))


def proposals(
    load: Loader, scene: Scene, calibration: Calibration, answers: Lengths, *, num_gpus: int,
    metric: Metric = "tokens", fixed: Spec | None = None, most: int = 3, num_others: int = 2,
) -> Found:  # fmt: skip
    """Search for allocations that a run with this configuration would start with. Raises PlanError."""

    def accepts(one: Scene, overrides: Sequence[str]) -> bool:
        try:
            loaded = scene_of(load(overrides).config, scene.gpu)
            return all(getattr(loaded, name) == getattr(one, name) for name in _PROPOSED)
        except (ConfigError, PlanError, AllocationError):
            return False

    return search(
        scene, calibration, answers,
        num_gpus=num_gpus, accepts=accepts, metric=metric, fixed=fixed, most=most, num_others=num_others,
    )  # fmt: skip
