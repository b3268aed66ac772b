"""Memory of a run by rank and phase, before anything starts: what is held, its peak, and what would lower it.

The arithmetic of a rank is that of mcore_adapter/memory, which the engine itself uses. Invariant: bytes are what torch
allocates, but for "context", which the driver holds beside it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from allocation import TRAINER_ROLE, AllocationError, ParallelLayout, layers_of_chunks
from core.config.experiments import ExperimentConfig
from core.placement.rules import split_errors
from core.planning.scene import Engine, PlanError, Scene, Servers, chosen_gpu, scene_of
from mcore_adapter.memory.estimate import (
    SHARE_OF_HOST,
    SPARE,
    HostPiece,
    States,
    UpdateShape,
    checkpoint_pieces,
    choose,
    drawing_bytes,
    host_bytes,
    in_flight,
    page_locked,
    peak,
    rank_states,
)
from mcore_adapter.settings import FP32_ROWS, MLP_TOKENS, Level
from model_specs.config import ModelConfig

GIB, _MIB = 2**30, 2**20
CONTEXT_BYTES = 0.7 * GIB
"""CUDA's context with the loaded kernels of a process."""
_GROUP_BYTES = 0.4 * GIB  # NCCL's buffers of one group of ranks
_BLAS_BYTES = 3 * (32 << 20)  # workspaces of matrix products
_DRIVER_MIB = 600  # of a GPU that the driver shows, and torch does not
_BUCKETS = 3  # of a weight update, at least
_MOMENTS_ON_THE_WAY = 3 * (1 << 28)  # pieces of moments of an optimizer step with offload
_BEGIN_BYTES, _RANK_BYTES, _NCCL_BYTES = 1.10e9, 2.38e9, 0.39e9
"""Host memory of a trainer rank with a GPU, as measured: when its weights are filled, after its first updates, and what
NCCL adds."""
_CPU_RANK_BYTES, _CPU_GENERATOR_BYTES = 0.37e9, 0.25e9  # without a model, as measured
_ROLLOUT_BYTES, _DRIVER_BYTES, _SERVER_BYTES = 1.5e9, 0.9e9, 6e9  # assumed where GPUs are
_CPU_ROLLOUT_BYTES, _CPU_DRIVER_BYTES = 0.36e9, 0.60e9  # with reward workers and Ray, as measured
_MANY = 1 << 20  # microbatches
_META_MIB, _GRAPH_MIB = 512, 2
"""Of a server, and of its CUDA graphs for each request at once (ServerArgs, reserved_mem)."""
_BESIDE = ("context", "server")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Memory of a GPU in one phase of a step."""

    name: str
    parts: Mapping[str, float]
    """Bytes by purpose. Not of torch are "context", and "server": of a server on the same GPU."""
    detail: str = ""
    """Where in the phase the peak is, and what is recomputed."""
    on_host: float = 0.0
    """Bytes of activations in host memory."""

    @property
    def allocated(self) -> float:
        """Bytes that torch has allocated in the trainer at the peak."""
        return sum(self.parts.values()) - self.beside

    @property
    def beside(self) -> float:
        """Bytes of the context and of a server on the same GPU."""
        return sum(self.parts.get(name, 0.0) for name in _BESIDE)

    @property
    def total(self) -> float:
        """All of them, with the share that the allocator needs beside what it has allocated."""
        return _needed(self.allocated, self.beside)


def _needed(allocated: float, beside: float) -> float:
    return allocated / (1 - SPARE) + beside


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """The ranks of one pipeline stage of the trainer, which are alike."""

    stage: int
    num_ranks: int
    layers: int
    """Of the actor."""
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """One GPU of a server."""

    weights: float
    cache: float
    """Bytes of keys and values of tokens; negative: the weights do not fit."""
    tokens: int
    """Tokens whose keys and values fit into the server."""
    longest: int
    """Sequences of the longest length that fit."""
    rest: float
    """What is left for CUDA graphs and activations."""
    graphs: float
    """What the server reserves of it for the graphs."""
    context: float
    trainer: float = 0.0
    """What the trainer keeps on the same GPU while the server samples."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory of a whole run."""

    ranks: tuple[RankPlan, ...]
    servers: ServerPlan | None
    host: Mapping[str, float]
    """Bytes of the trainer's first node, by purpose, at its peak."""
    limit: float
    """Bytes of a GPU."""

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

    @property
    def fits(self) -> bool:
        """Whether trainer and servers do."""
        return self.trainer == "fits" and not self.server_problem

    @property
    def is_tight(self) -> bool:
        """Whether the trainer is, and servers fit."""
        return self.trainer == "is tight" and not self.server_problem

    @property
    def server_problem(self) -> str:
        """Why the servers cannot start, and what helps; or empty."""
        if self.servers is None or self.servers.tokens > 0:
            return ""
        if self.servers.cache + self.servers.graphs > 0:
            return "The CUDA graphs of a server leave no memory for its cache; lower generator.max_running"
        return (
            "The weights of a server leave no memory for its cache; use more tensor-parallel ranks (m) for the servers"
        )


SAMPLING = "sampling"
"""Phase of a GPU that trainer and servers share, in the turn of the servers."""


def plan_memory(scene: Scene) -> MemoryPlan:
    """Return the memory of every rank, server and node of a run."""
    ranks = tuple(_rank(scene, stage) for stage in range(scene.actor.layout.pp))
    on_gpu = scene.servers is not None and scene.servers.on_gpu
    servers = plan_servers(scene, scene.servers) if on_gpu and scene.servers else None
    if servers is not None and scene.shares_gpus:
        kept = max(p.allocated + p.parts["context"] for rank in ranks for p in rank.phases if p.name == SAMPLING)
        servers = replace(servers, trainer=kept, rest=servers.rest - kept)
    limit = scene.gpu.gib * GIB if scene.on_gpu else float("inf")
    return MemoryPlan(ranks=ranks, servers=servers, host=_host(scene, ranks), limit=limit)


def _rank(scene: Scene, stage: int) -> RankPlan:
    layout = scene.actor.layout
    per_stage = layout.world_size // layout.pp
    own = layers_of_chunks(scene.actor.config.num_layers, layout)[stage :: layout.pp]
    phases = tuple(_phases(scene, stage * per_stage))
    return RankPlan(stage=stage, num_ranks=per_stage, layers=sum(map(len, own)), phases=phases)


def _phases(scene: Scene, rank: int) -> Iterator[Phase]:
    """Yield the phases of a rank of the trainer, and of a server on its GPU."""
    held, beside = _held_by_all(scene, rank)
    for engine in scene.engines:
        stage = _stage(engine, rank)
        if engine.trains:
            yield _update(scene, engine, stage, held, beside)
            step = _optimizer_step(engine, states_of(engine, stage))
            if not scene.on_gpu:  # gloo reduces gradients, and gathers weights, in copies
                step["buckets"] = float(states_of(engine, stage).gradients)
            if step:
                parts = {**held, **{name: held.get(name, 0.0) + size for name, size in step.items()}, **beside}
                yield Phase(name=f"{engine.name} optimizer", parts=parts)
        else:
            parts = {**held, "activations": _inference_bytes(engine, stage), **beside}
            yield Phase(name=f"{engine.name} log-probs", parts=parts)
    if scene.servers is None:
        return
    buckets = {"buckets": float(min(_BUCKETS * scene.bucket_bytes, _whole_weights(scene.actor)))}
    if "server" not in beside:
        yield Phase(name="weight update", parts={**held, **buckets, **beside})
        return
    # In turns: the actor's weights stay on the GPU, which servers read; the server takes its weights, then its cache.
    weights = float(states_of(scene.actor, _stage(scene.actor, rank)).weights)
    kept = {"weights": weights} | {name: held[name] for name in ("workspaces", "FP8 copies") if name in held}
    server = plan_servers(scene, scene.servers)
    beside["server"] += server.weights
    yield Phase(name="weight update", parts={**kept, **buckets, **beside})
    beside["server"] += max(0.0, server.cache) + _server_activations(scene.servers, scene.gpu.gib)
    yield Phase(name=SAMPLING, parts={**kept, **beside})


def _whole_weights(engine: Engine) -> int:
    """Return the bytes of the weights of a model, which a weight update sends."""
    return rank_states(engine.config, ParallelLayout(), pp_rank=0, trains=False, itemsize=engine.itemsize).weights


def _held_by_all(scene: Scene, rank: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return what a rank holds in its turn, of all engines, and what is beside it on its GPU."""
    held: dict[str, float] = {}
    for engine in scene.engines:
        for part, size in _held(engine, states_of(engine, _stage(engine, rank))).items():
            held[part] = held.get(part, 0.0) + size
        if scene.on_gpu:
            held["workspaces"] = held.get("workspaces", 0.0) + _workspaces(engine, scene.longest)
    groups = sum(size > 1 for e in scene.engines for size in _degrees(e))
    beside = {"context": CONTEXT_BYTES + groups * _GROUP_BYTES if scene.on_gpu else 0.0}
    if scene.shares_gpus and scene.on_gpu:  # a server that has released its weights and its cache
        graphs = 0.0 if scene.servers is None else _graph_bytes(scene.servers)
        beside["server"] = CONTEXT_BYTES + _META_MIB * _MIB + graphs
    return held, beside


def usual_level(scene: Scene, engine: Engine) -> Level:
    """Return what most layers of the first stage recompute."""
    held, beside = _held_by_all(scene, 0)
    levels, _ = _levels(scene, engine, update_shape(engine, 0), sum(held.values()), sum(beside.values()))
    return Counter(levels).most_common(1)[0][0]


def _degrees(engine: Engine) -> tuple[int, ...]:
    layout = engine.layout
    return layout.tp, layout.pp, layout.cp, layout.dp, layout.ep


def engine_held(engine: Engine, stage: int, *, longest: int) -> float:
    """Return the bytes that torch has allocated between two updates of one engine alone."""
    return sum(_held(engine, states_of(engine, stage)).values()) + _workspaces(engine, longest)


def engine_peak(engine: Engine, stage: int, *, longest: int) -> float:
    """Return the bytes that torch allocates at the peak of an update or optimizer step of one engine alone."""
    state, held = states_of(engine, stage), engine_held(engine, stage, longest=longest)
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


def _stage(engine: Engine, rank: int) -> int:
    return rank // (engine.layout.world_size // engine.layout.pp) % engine.layout.pp


def states_of(engine: Engine, stage: int) -> States:
    """Return what an engine holds on the ranks of a stage."""
    return rank_states(
        engine.config, engine.layout, pp_rank=stage, is_critic=engine.is_critic, itemsize=engine.itemsize,
        gradient_itemsize=engine.gradient_itemsize, trains=engine.trains,
    )  # fmt: skip


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
    )  # fmt: skip


def _update(scene: Scene, engine: Engine, stage: int, held: Mapping[str, float], beside: Mapping[str, float]) -> Phase:
    shape = update_shape(engine, stage)
    levels, words = _levels(scene, engine, shape, sum(held.values()), sum(beside.values()))
    moment = peak(shape, levels)
    detail = f"at the {moment.name}; recomputed: {words}"
    if engine.config.moe is not None and engine.layout.ep > 1:
        worst = peak(replace(shape, imbalance=worst_imbalance(engine)), levels).total - moment.total
        detail += f"; with all tokens for the experts of one rank {worst / GIB:.1f} GiB more"
    parts = {**held, **moment.parts, **beside}
    on_host = host_bytes(shape, levels) if scene.on_gpu else 0.0
    return Phase(name=f"{engine.name} update", parts=parts, detail=detail, on_host=on_host)


def worst_imbalance(engine: Engine) -> float:
    """Return the copies that a rank receives, by the mean, where every token of all ranks goes to its experts."""
    moe = engine.config.moe
    assert moe is not None, "the caller has a model with experts"
    local = moe.num_experts // engine.layout.ep
    return engine.layout.ep * min(moe.top_k, local) / moe.top_k


def _levels(
    scene: Scene, engine: Engine, shape: UpdateShape, held: float, beside: float
) -> tuple[tuple[Level, ...], str]:
    """Return what each layer recomputes, and that in words; with auto as the engine will choose it."""
    if engine.recompute != "auto":
        return (engine.recompute,) * len(shape.layers), engine.recompute
    whole = engine.limit_gib * GIB if engine.limit_gib else (1 - SPARE) * (scene.gpu.gib * GIB - beside)
    if not scene.on_gpu:
        whole = float("inf")
    host = _host_limit(scene, engine)
    choice = choose(shape, whole - held, host_limit_bytes=host or 0.0)
    words = f"auto, {choice}"
    if host is None and "full" in choice.levels:
        words += " (no activations in host memory are planned: how much another machine has left is unknown; set "
        words += f"{engine.name}.gradient_checkpointing_host_gib to plan with them)"
    return choice.levels, words


def _host_limit(scene: Scene, engine: Engine) -> float | None:
    """Return the bytes of host memory that activations of a rank may take, as the engine will find them; None where the
    host is another machine."""
    if not scene.on_gpu:
        return 0.0
    if engine.host_gib is not None:
        return engine.host_gib * GIB
    if scene.gpu.host_bytes is None:
        return None
    ranks = len(_ranks_of_node(scene))
    taken = sum((_processes(scene) | _pinned(scene)).values()) + ranks * _RANK_BYTES
    return SHARE_OF_HOST * max(0.0, scene.gpu.host_bytes - taken) / ranks


def _inference_bytes(engine: Engine, stage: int) -> float:
    """Return the bytes of activations of a pass without gradients."""
    config, layout = engine.config, engine.layout
    tokens = engine.microbatch_tokens / layout.cp
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim / layout.tp
    width = 3 * config.intermediate_size / layout.tp
    inner = max(2 * heads * tokens, width * tokens if config.moe else width * min(tokens, MLP_TOKENS))
    head = 4 * FP32_ROWS * config.vocab_size / layout.tp if stage == layout.pp - 1 and not engine.is_critic else 0.0
    return engine.itemsize * (3 * tokens * config.hidden_size + inner) + head


def plan_servers(scene: Scene, servers: Servers) -> ServerPlan:
    """Return the memory of a GPU of a server: it takes its share of what is free before it loads the weights."""
    weights = server_weights(servers)
    free = scene.gpu.gib * GIB - CONTEXT_BYTES
    share = servers.colocated_share if scene.shares_gpus else servers.share or _usual_share(servers, scene.gpu.gib)
    cache = free * share - weights
    per_token = cache_bytes_per_token(servers)
    most = 2 * servers.max_running * servers.config.max_position_embeddings
    tokens = max(0, min(int(cache / per_token), most))
    return ServerPlan(
        weights=weights,
        cache=min(cache, tokens * per_token) if tokens else cache,
        tokens=tokens,
        longest=tokens // max(1, scene.longest),
        rest=free * (1 - share),
        graphs=_graph_bytes(servers),
        context=CONTEXT_BYTES,
    )


def _usual_share(servers: Servers, gpu_gib: float) -> float:
    """Return mem_fraction_static as a server chooses it: activations of a chunk of prompts, ranks, CUDA graphs
    (ServerArgs, reserved_mem)."""
    mib = 1024 * gpu_gib + _DRIVER_MIB
    reserved = _META_MIB + 1.5 * _prefill_tokens(gpu_gib) + servers.layout.tp * servers.layout.pp * 128
    reserved += _graph_bytes(servers) / _MIB
    return round(1 - max(reserved, 10240 if mib > 60 * 1024 else 0) / mib, 3)


def _graph_bytes(servers: Servers) -> float:
    """Return the bytes that a server reserves for its CUDA graphs."""
    return float(_GRAPH_MIB * servers.max_running * _MIB)


def _prefill_tokens(gpu_gib: float) -> int:
    """Return the tokens of prompts that a server computes at once (ServerArgs, chunked_prefill_size)."""
    mib = 1024 * gpu_gib + _DRIVER_MIB
    return 16384 if mib > 160 * 1024 else 8192 if mib > 60 * 1024 else 4096


def _server_activations(servers: Servers, gpu_gib: float) -> float:
    """Return the bytes that a server takes for a chunk of prompts, and for the logits of all requests."""
    config, tp, moe = servers.config, servers.layout.tp, servers.config.moe
    width = config.intermediate_size if moe is None else moe.top_k * moe.intermediate_size
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    token = servers.itemsize * (3 * config.hidden_size + max(2 * heads, 3 * width) / tp)
    return _prefill_tokens(gpu_gib) * token + 2 * 4 * servers.max_running * config.vocab_size


def server_weights(servers: Servers) -> float:
    """Return the bytes of the weights of one GPU of a server, of its largest stage."""
    layout = ParallelLayout(tp=servers.layout.tp, pp=servers.layout.pp, ep=servers.layout.ep)
    config = servers.config
    if config.mla is None and config.num_kv_heads % layout.tp:  # each rank has one, several have the same
        config = replace(config, num_kv_heads=layout.tp)
    largest = 0.0
    for stage in range(layout.pp):
        parameters = rank_states(config, layout, pp_rank=stage, trains=False).parameters
        linear = sum(parameters.get(kind, 0) for kind in ("attention", "MLP"))
        experts = parameters.get("experts", 0) * layout.ep / layout.tp  # without ep, each expert is split
        rest = sum(parameters.get(kind, 0) for kind in ("embedding", "head"))
        largest = max(largest, (linear + experts) * (1 if servers.fp8 else servers.itemsize) + rest * servers.itemsize)
    return largest


def cache_bytes_per_token(servers: Servers) -> float:
    """Return the bytes of keys and values that one GPU of a server keeps for a token."""
    config, layout = servers.config, servers.layout
    layers = -(-config.num_layers // layout.pp)
    if config.mla is not None:
        return float(layers * (config.mla.kv_lora_rank + config.mla.qk_rope_head_dim) * servers.itemsize)
    heads = max(1, config.num_kv_heads // layout.tp)
    return float(layers * 2 * heads * config.head_dim * servers.itemsize)


def _host(scene: Scene, plans: Sequence[RankPlan]) -> dict[str, float]:
    """Return the host memory of the trainer's first node, by purpose, at its peak: in updates, or when random weights
    are drawn. To load a recover checkpoint takes less than the copy for the next one."""
    others = _processes(scene)
    node = [(rank, plans[_stage(scene.actor, rank)]) for rank in _ranks_of_node(scene)]
    moments = [
        _sums(_updating(scene, rank, plan) for rank, plan in node) | others | _pinned(scene),
        _sums(_drawing(scene, rank) for rank, _ in node) | others,
    ]
    most = max(moments, key=lambda moment: sum(moment.values()))
    return {name: size for name, size in most.items() if size}


def host_of_rank(scene: Scene, plan: RankPlan) -> float:
    """Return the bytes of host memory that a rank of a stage takes at its peak, in updates or before, without the pages
    of a recover checkpoint."""
    rank = plan.stage * plan.num_ranks
    pinned = sum(_pinned_by_rank(scene, rank).values())
    return max(sum(_updating(scene, rank, plan).values()) + pinned, sum(_drawing(scene, rank).values()))


def _sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in parts:
        for name, size in each.items():
            total[name] = total.get(name, 0.0) + size
    return total


def _ranks_of_node(scene: Scene) -> range:
    return range(min(scene.actor.layout.world_size, scene.n_gpus_per_node))


_RANKS = "trainer ranks"


def _updating(scene: Scene, rank: int, plan: RankPlan) -> dict[str, float]:
    """Return what a rank takes of the host in updates, beside what is pinned."""
    if not scene.on_gpu:
        return {_RANKS: _CPU_RANK_BYTES + plan.peak.allocated}
    nccl = _NCCL_BYTES if scene.actor.layout.world_size > 1 else 0.0
    return {_RANKS: _RANK_BYTES + nccl, "activations": sum(phase.on_host for phase in plan.phases)}


def _drawing(scene: Scene, rank: int) -> dict[str, float]:
    """Return what a rank takes when its weights are filled. Stages that share an embedding have met before."""
    drawn, shares = 0.0, False
    for engine in scene.engines:
        layout, stage = engine.layout, _stage(engine, rank)
        shares |= engine.config.tied and not engine.is_critic and layout.pp > 1 and stage in (0, layout.pp - 1)
        if engine.is_drawn:
            size = drawing_bytes(
                engine.config, layout, pp_rank=stage, is_critic=engine.is_critic, itemsize=engine.itemsize
            )
            drawn = max(drawn, size)
    if scene.on_gpu:
        process = _BEGIN_BYTES + shares * _NCCL_BYTES
    else:
        process = _CPU_RANK_BYTES + sum(states_of(engine, _stage(engine, rank)).total for engine in scene.engines)
    return {_RANKS: process, "random weights": drawn}


def _processes(scene: Scene) -> dict[str, float]:
    """Return what processes other than trainer ranks take of the first node, and the object store."""
    batch = scene.sequences * scene.longest * scene.token_bytes
    driver = _DRIVER_BYTES + _ROLLOUT_BYTES if scene.on_gpu else _CPU_DRIVER_BYTES + _CPU_ROLLOUT_BYTES
    parts = {"driver and rollout": driver}
    if (servers := scene.servers) is None:
        return parts
    # Of a batch, one copy is in the object store, and one is leased; as many are sampled as staleness allows.
    parts["episodes"] = float(batch * (2 + (1 + scene.max_staleness if scene.keeps_episodes else 0)))
    each = _SERVER_BYTES if servers.on_gpu else _CPU_GENERATOR_BYTES + server_weights(servers)
    has_gpus = servers.on_gpu and scene.on_gpu and not scene.shares_gpus
    room = scene.n_gpus_per_node - (len(_ranks_of_node(scene)) if has_gpus else 0)  # GPUs beside the trainer's
    parts["servers"] = min(servers.layout.world_size, room) * each
    if scene.keeps_weights:
        parts["copy of the weights"] = float(_whole_weights(scene.actor))
    return parts


def _pinned(scene: Scene) -> dict[str, float]:
    """Return what ranks of the first node hold in host memory during the whole run."""
    parts = _sums(_pinned_by_rank(scene, rank) for rank in _ranks_of_node(scene))
    if scene.writes_checkpoints:
        parts["recover checkpoint"] = sum(
            piece.num_ranks * (page_locked(piece.num_bytes) if scene.on_gpu else piece.num_bytes)
            for engine in scene.engines if engine.trains
            for stage in {_stage(engine, rank) for rank in _ranks_of_node(scene)}
            for piece in _pieces(engine, stage)
        )  # fmt: skip
    return parts


def _pinned_by_rank(scene: Scene, rank: int) -> dict[str, float]:
    offloaded = away = 0.0
    for engine in scene.engines:
        states = states_of(engine, _stage(engine, rank))
        if engine.offload:
            offloaded += states.masters + states.moments
        if scene.shares_gpus and scene.on_gpu:
            away += 0 if engine.offload else states.masters + states.moments
            away += 0 if engine is scene.actor else states.weights
    return {"optimizer in host memory": offloaded, "trainer while servers sample": away}


def _pieces(engine: Engine, stage: int) -> Sequence[HostPiece]:
    return checkpoint_pieces(
        engine.config, engine.layout, pp_rank=stage, is_critic=engine.is_critic, itemsize=engine.itemsize
    )


def checkpoint_bytes(scene: Scene) -> float:
    """Return the bytes that the rank with most copies to host memory for a recover checkpoint."""
    trained = [engine for engine in scene.engines if engine.trains]
    stages = max(engine.layout.pp for engine in trained)
    return max(
        sum(piece.num_bytes for e in trained for piece in _pieces(e, min(stage, e.layout.pp - 1)))
        for stage in range(stages)
    )


def smallest_trainer(scene: Scene) -> Scene | None:
    """Return the trainer of a scene on the smallest number of GPUs, a power of two, on which it fits with recomputation
    of whole layers in any layout, with the optimizer in host memory where it does not fit otherwise; None up to
    4096."""
    world, alone = 1, replace(scene, servers=None).with_engines(recompute="full")
    limit = scene.gpu.gib * GIB
    while world <= 4096:
        for one in dict.fromkeys((alone, alone.with_engines(offload=True))):
            for layout in small_layouts(scene.actor.config, world):
                placed = one.in_layout(layout)
                held, beside = _held_by_all(placed, 0)  # much faster than a plan
                if _needed(sum(held.values()), sum(beside.values())) <= limit and plan_memory(placed).fits:
                    return placed
        world *= 2
    return None


def needed_gpus(scene: Scene, smallest: Scene | None) -> str:
    """Return what smallest_trainer() has found, in words."""
    size, level = f"GPUs of {scene.gpu.gib:.0f} GiB", "all layers recomputed"
    if smallest is None:
        return f"The trainer needs more than 4096 {size} with {level} and the optimizer in host memory."
    actor = smallest.actor
    place = "in host memory" if actor.offload else "on the GPUs"
    where = f"as {actor.layout} with {level} and the optimizer {place}"
    return f"The trainer needs at least {actor.layout.world_size} {size}, {where}."


def small_layouts(config: ModelConfig, world: int) -> Iterator[ParallelLayout]:
    """Yield layouts of so many ranks that cut the model into as many parts as possible, or over data-parallel ranks."""
    for tp in (1, 2, 4, 8):
        if world % tp or config.num_heads % tp or config.num_kv_heads % tp or config.vocab_size % tp:
            continue
        for pp in (1, 2, 4, 8, 16):
            if (world // tp) % pp or pp > config.num_layers:
                continue
            dp = world // tp // pp
            eps = [1] if config.moe is None else [n for n in (1, 2, 4, 8, 16, 32) if config.moe.num_experts % n == 0]
            for ep in eps:
                if dp * tp % ep == 0:
                    yield ParallelLayout(dp=dp, tp=tp, pp=pp, ep=ep)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the configuration and the plan that follows."""

    keys: str
    """Overrides, as on the command line."""
    plan: MemoryPlan

    @property
    def peak_gib(self) -> float:
        return self.plan.peak.total / GIB

    @property
    def fits(self) -> bool:
        """Whether the trainer does, if only just."""
        return self.plan.trainer != "does not fit"

    @property
    def words(self) -> str:
        """What it comes to."""
        of_trainer = "the trainer " if self.plan.server_problem else ""
        return f"needs {self.peak_gib:.1f} GiB, {of_trainer}{self.plan.trainer}"


def advice(scene: Scene, plan: MemoryPlan) -> list[Change]:
    """Return changes that lower the peak: the first that makes the run fit, cheapest first, or else those that lower it
    most. Empty where the run fits."""
    if plan.peak.total <= plan.limit:
        return []
    changes = [Change(keys=keys, plan=plan_memory(changed)) for keys, changed in _changes(scene, plan)]
    for state in ("fits", "is tight"):
        if fitting := [change for change in changes if change.plan.trainer == state]:
            return fitting[:3]
    lower = [change for change in changes if change.peak_gib < plan.peak.total / GIB]
    return sorted(lower, key=lambda change: change.peak_gib)[:3]


def verdict(scene: Scene, plan: MemoryPlan, changes: Sequence[Change]) -> str:
    """Return whether the run fits and, where no change of advice() would help, the smallest number of GPUs."""
    peak = plan.peak
    if not scene.on_gpu:
        return f"The trainer computes on the CPU: a rank needs about {peak.allocated / GIB:.1f} GiB of host memory."
    if plan.is_tight:
        spare = plan.limit - peak.allocated - peak.beside
        return (
            f"It is tight: {spare / GIB:.1f} GiB remain for fragmentation in the {peak.name}, "
            f"{(peak.total - peak.allocated - peak.beside) / GIB:.1f} are recommended."
        )
    if plan.fits:
        if any(engine.recompute == "auto" and engine.trains for engine in scene.engines):
            return "It fits; gradient_checkpointing=auto uses the memory that is free."
        return f"It fits: {(plan.limit - peak.total) / GIB:.1f} GiB remain."
    problems = []
    if peak.total > plan.limit:
        problems.append(f"{(peak.total - plan.limit) / GIB:.1f} GiB are missing in the {peak.name}.")
        if not any(change.fits for change in changes) and scene.shares_gpus and peak.parts["server"] > peak.allocated:
            problems.append("Use more tensor-parallel ranks (m) for the servers, or GPUs of their own (+).")
        elif not any(change.fits for change in changes):
            problems.append(needed_gpus(scene, smallest_trainer(scene)))
    if plan.server_problem:
        share = f", or raise {_SHARE_KEY}" if scene.shares_gpus else ""
        problems.append(f"{plan.server_problem}{share}.")
    return f"It does not fit: {' '.join(problems)}"


def summary_lines(config: ExperimentConfig) -> list[str]:
    """Return the plan of a configuration in a line, for the GPU of this machine or an H100; nothing where the trainer
    has no GPUs, or what is wrong is reported elsewhere."""
    try:
        scene = scene_of(config, chosen_gpu())
    except (PlanError, AllocationError):
        return []
    if not scene.on_gpu:
        return []
    plan, gpu = plan_memory(scene), scene.gpu
    stage = next(rank.stage for rank in plan.ranks if rank.peak is plan.peak)
    needs = f"{plan.peak.name} of stage {stage} needs {plan.peak.total / GIB:.1f} of {gpu.gib:.1f} GiB"
    line = f"Memory of {gpu.name}: {needs}"
    if plan.servers is not None:
        line += f"; a server caches {plan.servers.tokens:,} tokens"
    return [f"{line}. {verdict(scene, plan, advice(scene, plan))} `slipstream plan` shows the parts."]


_SHARE_KEY = "generator.flags.mem_fraction_static"  # before that of the section of the backend


def _changes(scene: Scene, plan: MemoryPlan) -> Iterator[tuple[str, Scene]]:
    """Yield changes from cheap to costly in time; where a shared GPU is too small for the turn of the servers, first
    those with a smaller server."""
    if (share := _smaller_share(scene, plan)) and scene.servers is not None:
        smaller = replace(scene, servers=replace(scene.servers, share=share, colocated_share=share))
        keys = f"{_SHARE_KEY}={share:g}"
        yield keys, smaller
        yield from ((f"{keys} {more}", changed) for more, changed in _changes_of_trainer(smaller))
    yield from _changes_of_trainer(scene)


def _smaller_share(scene: Scene, plan: MemoryPlan) -> float | None:
    """Return the largest mem_fraction_static with which a server fits beside what the trainer keeps; None where that is
    not needed, or leaves no memory for its cache."""
    sampling = [phase.total for rank in plan.ranks for phase in rank.phases if phase.name == SAMPLING]
    if not sampling or plan.servers is None or max(sampling) <= plan.limit:
        return None
    free = scene.gpu.gib * GIB - CONTEXT_BYTES
    held = plan.servers.weights + max(0.0, plan.servers.cache) - (max(sampling) - plan.limit)
    share = math.floor(100 * held / free) / 100
    return share if share * free > plan.servers.weights else None


def _changes_of_trainer(scene: Scene) -> Iterator[tuple[str, Scene]]:
    offloaded = scene.with_engines(offload=True)
    changed = [scene.with_engines(recompute="auto"), with_half_microbatches(scene)]
    if any(engine.trains and engine.recompute != "auto" for engine in scene.engines):
        changed.append(scene.with_engines(recompute="full"))
    changed += [offloaded, offloaded.with_engines(recompute="auto")]
    for one in changed:
        if keys := keys_of_engines(one, scene):
            yield " ".join(keys), one
    for field in ("tp", "pp", "cp"):
        if other := _doubled(scene, field):
            yield _placed(other), other


def with_half_microbatches(scene: Scene) -> Scene:
    """Return the scene with half of the tokens of a microbatch, but for a longest sequence."""
    engines = (replace(e, tokens=min(e.tokens, max(scene.longest, e.tokens // 2))) for e in scene.engines)
    return replace(scene, engines=tuple(engines))


_SECTIONS = {"model": "allocation", "ref": "ref_inf"}
"""Section of the microbatches of an engine, where it is not NAME_train."""


def keys_of_engines(scene: Scene, asked: Scene, *, with_level: bool = False) -> list[str]:
    """Return the overrides, as on the command line, that give the engines of `asked` the recomputation, offload and
    microbatches of `scene`. `with_level`: also of a recomputation that is the same."""
    keys = []
    for engine, before in zip(scene.engines, asked.engines, strict=True):
        name = engine.name
        if engine.offload != before.offload:
            keys.append(f"{name}.optimizer.offload={str(engine.offload).lower()}")
        if engine.recompute != before.recompute or (with_level and engine.trains):
            level = "true" if engine.recompute == "full" else engine.recompute
            keys.append(f"{name}.gradient_checkpointing={level}")
        if engine.tokens != before.tokens and (name != "ref" or scene.servers is not None):  # DPO: that of the model
            keys.append(f"{_SECTIONS.get(name, f'{name}_train')}.mb_spec.max_tokens_per_mb={engine.tokens}")
    return keys


def _doubled(scene: Scene, field: str) -> Scene | None:
    """Return the scene with half the data-parallel ranks of the trainer and twice those of another kind; None where its
    models cannot be split so."""
    layout = scene.actor.layout
    try:
        other = replace(layout, dp=layout.dp // 2, **{field: getattr(layout, field) * 2})
    except AllocationError:
        return None  # experts do not divide among the ranks of a stage
    engines = tuple(replace(e, layout=other) if e.layout == layout else e for e in scene.engines)
    if layout.dp % 2 or not all(divides(engine.config, engine.layout, TRAINER_ROLE) for engine in engines):
        return None
    return replace(scene, engines=engines)


def divides(config: ModelConfig, layout: ParallelLayout, role: str) -> bool:
    """Return whether a model can be split over such ranks."""
    return not split_errors(layout, role, config, path="")


def _placed(scene: Scene) -> str:
    """Return the key of the layouts; words where the models of the trainer have several."""
    trainer = scene.actor.layout
    if any(engine.layout != trainer for engine in scene.engines):
        return f"the trainer as {trainer}"
    return f"allocation_mode={mode_of(scene)}"


def mode_of(scene: Scene) -> str:
    """Return allocation_mode of a run whose models of the trainer have one layout."""
    trainer, servers = scene.actor.layout, scene.servers
    if servers is None:
        return str(trainer)
    placed = replace(servers.layout, dp=servers.layout.dp + servers.num_auxiliary)
    return f"{servers.backend}.{placed}{'|' if scene.shares_gpus else '+'}{trainer}"
