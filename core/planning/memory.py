"""Memory of a run by rank and phase, before anything starts: what is held, and its peak, on GPUs and in host memory.

The arithmetic of a rank is that of mcore_adapter/memory, which the engine itself uses. Invariant: bytes are what torch
allocates, but for "context", which the driver holds, and "server", on the same GPU.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from allocation import layers_of_chunks
from core.planning.host_memory import RankUse, host_limit, host_memory, sums
from core.planning.scene import Engine, Scene
from core.planning.server_memory import (
    CONTEXT_BYTES,
    GIB,
    RELEASED_BYTES,
    ServerPlan,
    graph_bytes,
    plan_servers,
    server_activations,
)
from mcore_adapter.memory.estimate import (
    SPARE,
    States,
    UpdateShape,
    choose,
    host_bytes,
    in_flight,
    peak,
)
from mcore_adapter.settings import FP32_ROWS, MLP_TOKENS, Level

_GROUP_BYTES = 0.4 * GIB  # NCCL's buffers of one group of ranks
_BLAS_BYTES = 3 * (32 << 20)  # workspaces of matrix products
_BUCKETS = 3  # of a weight update, at least
_MOMENTS_ON_THE_WAY = 3 * (1 << 28)  # pieces of moments of an optimizer step with offload
_MANY = 1 << 20  # microbatches
_OF_OTHERS = ("server", "other roles")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Memory of a rank in one phase of a step."""

    name: str
    parts: Mapping[str, float]
    """Bytes by purpose. Not of torch in this process are "context" and "NCCL", on GPUs alone, "server", of a server on
    the same GPU, and "other roles", of processes of the trainer with another layout."""
    detail: str = ""
    """Where in the phase the peak is, and what is recomputed."""
    on_host: float = 0.0
    """Bytes of activations in host memory."""

    @property
    def beside(self) -> float:
        """Bytes of the context and of other processes on the same GPU."""
        return sum(self.parts.get(name, 0.0) for name in ("context", "NCCL", *_OF_OTHERS))

    @property
    def allocated(self) -> float:
        """Bytes that torch has allocated in the process at the peak."""
        return sum(self.parts.values()) - self.beside

    @property
    def slack(self) -> float:
        """Bytes that the allocator of a GPU needs for fragmentation; on the CPU there is none."""
        return self.allocated * SPARE / (1 - SPARE) if "context" in self.parts else 0.0

    @property
    def total(self) -> float:
        """All that the GPU must have."""
        return self.allocated + self.slack + self.beside

    @property
    def of_process(self) -> float:
        """The same without other processes."""
        return self.total - sum(self.parts.get(name, 0.0) for name in _OF_OTHERS)


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """Ranks of the trainer that are alike: of one pipeline stage of each model."""

    stage: int
    """Of the actor."""
    ranks: range
    layers: int
    """Of the actor."""
    models: Mapping[str, Mapping[str, float]]
    """Bytes that each model holds between its updates, by purpose."""
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def use(self) -> RankUse:
        """What they take of the host."""
        return RankUse(self.ranks, sum(phase.on_host for phase in self.phases), self.peak.total)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory of a whole run."""

    ranks: tuple[RankPlan, ...]
    servers: ServerPlan | None
    auxiliary: ServerPlan | None
    """Servers of the auxiliary model."""
    host: Mapping[str, float]
    """Bytes of the trainer's first node, by purpose, at its peak."""
    limit: float
    """Bytes of a GPU."""
    host_limit: float | None
    """Bytes of host memory that a node has left. None: not known."""

    @property
    def peak(self) -> Phase:
        return max((rank.peak for rank in self.ranks), key=lambda phase: phase.total)

    @property
    def trainer(self) -> Literal["fits", "is tight", "does not fit"]:
        """Whether the allocator has its spare memory at every peak, or less, and may run out of it by fragmentation."""
        if self.peak.total <= self.limit:
            return "fits"
        peak = max(phase.allocated + phase.beside for rank in self.ranks for phase in rank.phases)
        return "is tight" if peak <= self.limit else "does not fit"

    def name_of(self, rank: RankPlan) -> str:
        """Return the stage, or the ranks where models have stages of their own."""
        if len({one.stage for one in self.ranks}) == len(self.ranks):
            return f"stage {rank.stage}"
        return f"ranks {rank.ranks[0]} to {rank.ranks[-1]}"

    @property
    def host_total(self) -> float:
        """Bytes of the trainer's first node."""
        return sum(self.host.values())

    @property
    def host_missing(self) -> float:
        """Bytes of host memory that a node lacks, as far as is known."""
        return 0.0 if self.host_limit is None else max(0.0, self.host_total - self.host_limit)

    @property
    def fits(self) -> bool:
        """Whether trainer and servers do, and the host as far as is known."""
        return self.trainer == "fits" and self._fits_beside

    @property
    def is_tight(self) -> bool:
        """Whether the trainer is, and everything else fits."""
        return self.trainer == "is tight" and self._fits_beside

    @property
    def _fits_beside(self) -> bool:
        return not self.host_missing and all(s is None or s.tokens > 0 for s in (self.servers, self.auxiliary))


SAMPLING = "sampling"
"""Phase of a GPU that trainer and servers share, in the turn of the servers."""


def plan_memory(scene: Scene) -> MemoryPlan:
    """Return the memory of every rank, server and node of a run."""
    world = scene.actor.layout.world_size
    edges = {rank for e in scene.engines for rank in range(0, world, world // e.layout.pp)} | {world}
    ranks = tuple(_rank(scene, range(*edge)) for edge in pairwise(sorted(edges)))
    servers, auxiliary = (
        plan_servers(scene, one) if one is not None and one.on_gpu else None
        for one in (scene.servers, scene.servers and scene.servers.of_auxiliary)
    )
    if servers is not None and scene.shares_gpus:
        phases = [phase for rank in ranks for phase in rank.phases if phase.name == SAMPLING]
        kept = max(phase.allocated + phase.beside - phase.parts["server"] for phase in phases)
        servers = replace(servers, trainer=kept, rest=servers.rest - kept)
    limit = scene.gpu.gib * GIB if scene.on_gpu else float("inf")
    host = host_memory(scene, [rank.use for rank in ranks])
    return MemoryPlan(
        ranks=ranks, servers=servers, auxiliary=auxiliary, host=host, limit=limit, host_limit=scene.host_bytes
    )


def _rank(scene: Scene, ranks: range) -> RankPlan:
    stage = scene.actor.stage_of(ranks[0])
    layout = scene.actor.layout
    own = layers_of_chunks(scene.actor.config.num_layers, layout)[stage :: layout.pp]
    models = {engine.name: _held(engine, engine.states(engine.stage_of(ranks[0]))) for engine in scene.engines}
    phases = tuple(_phases(scene, ranks[0]))
    return RankPlan(stage=stage, ranks=ranks, layers=sum(map(len, own)), models=models, phases=phases)


def _phases(scene: Scene, rank: int) -> Iterator[Phase]:
    """Yield the phases of a rank of the trainer, and of a server on its GPU."""
    processes = scene.processes
    totals = [_between(scene, process, rank).of_process for process in processes]
    passes: list[list[Phase]] = []
    for number, process in enumerate(processes):
        passes.append(list(_passes(scene, process, rank, others=sum(totals) - totals[number])))
        totals[number] = max(phase.of_process for phase in passes[-1])
    for number, phases in enumerate(passes):  # the allocator of a process keeps what it has taken once
        for phase in phases:
            others = {"other roles": sum(totals) - totals[number]} if len(processes) > 1 else {}
            yield replace(phase, parts={**phase.parts, **others})
    if scene.servers is None:
        return
    held, beside = _held_by(scene, processes[0], rank), _beside(scene, processes[0], others=sum(totals[1:]))
    buckets = {"buckets": float(min(_BUCKETS * scene.bucket_bytes, scene.actor.whole_weights))}
    if "server" not in beside:
        yield Phase(name="weight update", parts={**held, **buckets, **beside})
        return
    # In turns: the actor's weights stay on the GPU, which servers read; the server takes its weights, then its cache.
    weights = float(scene.actor.states(scene.actor.stage_of(rank)).weights)
    kept = {"weights": weights} | {name: held[name] for name in ("workspaces", "FP8 copies") if name in held}
    beside = _beside(scene, processes[0], others=sum(sum(_context(one).values()) for one in processes[1:]))
    server = plan_servers(scene, scene.servers)
    beside["server"] += server.weights
    yield Phase(name="weight update", parts={**kept, **buckets, **beside})
    beside["server"] += max(0.0, server.cache) + server_activations(scene.servers, scene.gpu.gib)
    yield Phase(name=SAMPLING, parts={**kept, **beside})


def _passes(scene: Scene, process: Sequence[Engine], rank: int, *, others: float) -> Iterator[Phase]:
    """Yield the phases in which engines of a process compute. `others`: bytes of other processes of the trainer."""
    held, beside = _held_by(scene, process, rank), _beside(scene, process, others=others)
    for engine in process:
        stage = engine.stage_of(rank)
        if engine.trains:
            yield _update(scene, engine, stage, held, beside)
            step = _optimizer_step(engine, engine.states(stage))
            if not scene.on_gpu:  # gloo reduces gradients, and gathers weights, in copies
                step["buckets"] = float(engine.states(stage).gradients)
            if step:
                parts = {**held, **{name: held.get(name, 0.0) + size for name, size in step.items()}, **beside}
                yield Phase(name=f"{engine.name} optimizer", parts=parts)
        else:
            parts = {**held, "activations": _inference_bytes(engine, stage), **beside}
            yield Phase(name=f"{engine.name} log-probs", parts=parts)


def _between(scene: Scene, process: Sequence[Engine], rank: int) -> Phase:
    """Return what a process of a rank holds between two passes."""
    return Phase(name="", parts=_held_by(scene, process, rank) | _beside(scene, process, others=0.0))


def _held_by(scene: Scene, process: Sequence[Engine], rank: int) -> dict[str, float]:
    """Return what a process of a rank holds in the turn of the trainer."""
    held = sums(_held(engine, engine.states(engine.stage_of(rank))) for engine in process)
    if scene.on_gpu:
        held["workspaces"] = sum(_workspaces(engine, scene.longest) for engine in process)
    return held


def _beside(scene: Scene, process: Sequence[Engine], *, others: float) -> dict[str, float]:
    """Return what is on the GPU of a process that torch has not allocated in it: `others` are of the trainer."""
    if not scene.on_gpu:
        return {"other roles": others} if others else {}
    beside = _context(process) | ({"other roles": others} if others else {})
    if scene.shares_gpus:  # a server that has released its weights and its cache
        beside["server"] = RELEASED_BYTES + (0.0 if scene.servers is None else graph_bytes(scene.servers))
    return beside


def _context(process: Sequence[Engine]) -> dict[str, float]:
    layout = process[0].layout
    degrees = (layout.tp, layout.pp, layout.cp, layout.dp, layout.ep)
    return {"context": CONTEXT_BYTES, "NCCL": sum(size > 1 for size in degrees) * _GROUP_BYTES}


def smallest_total(scene: Scene) -> float:
    """Return bytes of a GPU below which no phase of the first stage fits, much faster than a plan. All engines have one
    layout."""
    return _between(scene, scene.engines, 0).total


def usual_level(scene: Scene, engine: Engine) -> Level:
    """Return what most layers of the first stage recompute."""
    if engine.recompute != "auto":
        return engine.recompute
    processes = scene.processes
    own = next(process for process in processes if engine.layout == process[0].layout)
    others = sum(_between(scene, process, 0).of_process for process in processes if process is not own)
    held, beside = _held_by(scene, own, 0), _beside(scene, own, others=others)
    levels, _ = _levels(scene, engine, update_shape(engine, 0), sum(held.values()), sum(beside.values()))
    return Counter(levels).most_common(1)[0][0]


def engine_held(engine: Engine, stage: int, *, longest: int) -> float:
    """Return the bytes that torch has allocated between two updates of one engine alone."""
    return sum(_held(engine, engine.states(stage)).values()) + _workspaces(engine, longest)


def engine_peak(engine: Engine, stage: int, *, longest: int) -> float:
    """Return the bytes that torch allocates at the peak of an update or optimizer step of one engine alone."""
    state, held = engine.states(stage), engine_held(engine, stage, longest=longest)
    levels: tuple[Level, ...] = ("none",)
    if engine.recompute != "auto":
        levels = (engine.recompute,)
    shape = update_shape(engine, stage)
    update = held + peak(shape, levels * len(shape.layers)).total
    return max(update, held + sum(_optimizer_step(engine, state).values()))


def _optimizer_step(engine: Engine, state: States) -> dict[str, float]:
    """Return the bytes that an optimizer step takes beside what is held."""
    step = {"masters": float(state.masters), "moments": float(_MOMENTS_ON_THE_WAY)} if engine.offload else {}
    if engine.gradient_itemsize < 4:  # copied to fp32
        step["gradients in fp32"] = float(state.masters)
    return step


def _held(engine: Engine, states: States) -> dict[str, float]:
    held = {"weights": float(states.weights), "gradients": float(states.gradients)}
    if not engine.offload:
        held |= {"masters": float(states.masters), "moments": float(states.moments)}
    if engine.fp8:  # two copies of each matrix, by rows and by columns
        held["FP8 copies"] = 2.0 * sum(states.parameters.get(kind, 0) for kind in ("attention", "MLP", "experts"))
    return held


def _workspaces(engine: Engine, longest: int) -> float:
    """Return the bytes of workspaces of matrix products, angles of positions, and the placeholder gradients that
    TransformerEngine keeps for each shape of a weight."""
    config, tp = engine.config, engine.layout.tp
    rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    sizes = [rows * config.hidden_size, config.num_heads * config.head_dim * config.hidden_size]
    sizes.append(3 * config.intermediate_size * config.hidden_size if config.moe is None else 0)
    angles = 2 * 4 * config.head_dim * (1 << max(1, longest - 1).bit_length())  # of two lengths, the second of half
    return _BLAS_BYTES + angles + (engine.itemsize * sum(sizes) / tp if engine.trains else 0.0)


def update_shape(engine: Engine, stage: int) -> UpdateShape:
    """Return what a rank of a stage computes of an update."""
    layout = engine.layout
    own = layers_of_chunks(engine.config.num_layers, layout)[stage :: layout.pp]
    return UpdateShape(
        config=engine.config, layout=layout, itemsize=engine.itemsize, tokens=engine.microbatch_tokens,
        in_flight=in_flight(layout, stage, _MANY), layers=max(own, key=len), has_head=stage == layout.pp - 1,
        has_embedding=stage == 0, is_critic=engine.is_critic, fp8=engine.fp8,
        imbalance=worst_imbalance(engine) if engine.has_worst_routing else 1.0,
    )  # fmt: skip


def _update(scene: Scene, engine: Engine, stage: int, held: Mapping[str, float], beside: Mapping[str, float]) -> Phase:
    shape = update_shape(engine, stage)
    levels, words = _levels(scene, engine, shape, sum(held.values()), sum(beside.values()))
    moment = peak(shape, levels)
    detail = f"at the {moment.name}; recomputed: {words}"
    parts = {**held, **moment.parts, **beside}
    on_host = host_bytes(shape, levels) if scene.on_gpu else 0.0
    return Phase(name=f"{engine.name} update", parts=parts, detail=detail, on_host=on_host)


def worst_imbalance(engine: Engine) -> float:
    """Return the copies that a rank receives, by the mean, where every token of all ranks goes to its experts."""
    moe = engine.config.moe
    if moe is None:
        return 1.0
    local = moe.num_experts // engine.layout.ep
    return engine.layout.ep * min(moe.top_k, local) / moe.top_k


def _levels(
    scene: Scene, engine: Engine, shape: UpdateShape, held: float, beside: float
) -> tuple[tuple[Level, ...], str]:
    """Return what each layer recomputes, and that in words; with auto as the engine will choose it, before it has seen
    how tokens choose their experts."""
    if engine.recompute != "auto":
        return (engine.recompute,) * len(shape.layers), engine.recompute
    whole = engine.limit_gib * GIB if engine.limit_gib else (1 - SPARE) * (scene.gpu.gib * GIB - beside)
    if not scene.on_gpu:
        whole = float("inf")
    host = host_limit(scene, engine)
    choice = choose(replace(shape, imbalance=1.0), whole - held, host_limit_bytes=host or 0.0)
    words = f"auto, {choice}"
    if host is None and "full" in choice.levels:
        words += " (with --host-gib, the memory of a node, activations in host memory are planned too)"
    return choice.levels, words


def _inference_bytes(engine: Engine, stage: int) -> float:
    """Return the bytes of activations of a pass without gradients."""
    config, layout = engine.config, engine.layout
    tokens = engine.microbatch_tokens / layout.cp
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim / layout.tp
    mlp = 3 * config.intermediate_size / layout.tp * min(tokens, MLP_TOKENS)
    if (moe := config.moe) is not None:  # copies of tokens before and after their experts, and what is within
        copies = worst_imbalance(engine) if engine.has_worst_routing else 1.0
        copies *= moe.top_k / layout.tp
        width = copies * (2 * config.hidden_size + 3 * moe.intermediate_size)
        mlp = tokens * (width + 3 * moe.shared_intermediate_size / layout.tp)
    inner = max(2 * heads * tokens, mlp)
    head = 4 * FP32_ROWS * config.vocab_size / layout.tp if stage == layout.pp - 1 and not engine.is_critic else 0.0
    return engine.itemsize * (3 * tokens * config.hidden_size + inner) + head
