"""Host memory of the trainer's first node: ranks, checkpoints, offload, episodes and other processes.

Invariant: page-locked memory counts as the powers of two that torch takes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from core.planning.scene import Engine, Scene
from core.planning.server_memory import GIB, server_weights
from mcore_adapter.memory.estimate import SHARE_OF_HOST, HostPiece, checkpoint_pieces, drawing_bytes, page_locked

_BEGIN_BYTES, _RANK_BYTES, _NCCL_BYTES = 1.10e9, 2.38e9, 0.39e9
"""Host memory of a trainer rank with a GPU, as measured: when its weights are filled, after its first updates, and what
NCCL adds."""
_CPU_RANK_BYTES, _CPU_GENERATOR_BYTES = 0.37e9, 0.25e9  # without a model, as measured
_ROLLOUT_BYTES, _DRIVER_BYTES, _SERVER_BYTES = 0.5e9, 0.9e9, 4e9  # where GPUs are, as measured; a server of one GPU
_CPU_ROLLOUT_BYTES, _CPU_DRIVER_BYTES = 0.36e9, 0.60e9  # with reward workers and Ray, as measured


class RankUse(NamedTuple):
    """What ranks that are alike take of the host in an update."""

    ranks: range
    activations: float
    """Bytes that wait there for the backward pass."""
    peak: float
    """Bytes of all that a rank takes of a GPU or, on the CPU, of the host."""


def host_memory(scene: Scene, uses: Sequence[RankUse]) -> dict[str, float]:
    """Return the host memory of the trainer's first node, by purpose, at its peak: in updates, or when random weights
    are drawn. To load a recover checkpoint takes less than the copy for the next one."""
    others = _other_processes(scene)
    node = [(rank, use) for use in uses for rank in use.ranks if rank in scene.ranks_of_node]
    moments = [
        sums(_updating(scene, rank, use) for rank, use in node) | others | _pinned(scene),
        sums(_drawing(scene, rank) for rank, _ in node) | others,
    ]
    most = max(moments, key=lambda moment: sum(moment.values()))
    return {name: size for name, size in most.items() if size}


def host_of_rank(scene: Scene, use: RankUse) -> float:
    """Return the bytes of host memory that a rank of a stage takes at its peak, in updates or before, without the pages
    of a recover checkpoint."""
    rank = use.ranks[0]
    pinned = sum(_pinned_by_rank(scene, rank).values())
    return max(sum(_updating(scene, rank, use).values()) + pinned, sum(_drawing(scene, rank).values()))


_RANKS = "trainer ranks"


def _updating(scene: Scene, rank: int, use: RankUse) -> dict[str, float]:
    """Return what a rank takes of the host in updates, beside what is pinned."""
    processes = len(scene.processes)
    if not scene.on_gpu:
        return {_RANKS: processes * _CPU_RANK_BYTES + use.peak}
    nccl = _NCCL_BYTES if scene.actor.layout.world_size > 1 else 0.0
    return {_RANKS: processes * (_RANK_BYTES + nccl), "activations": use.activations}


def _drawing(scene: Scene, rank: int) -> dict[str, float]:
    """Return what a rank takes when its weights are filled. Stages that share an embedding have met before."""
    drawn, shares = 0.0, False
    for engine in scene.engines:
        layout, stage = engine.layout, engine.stage_of(rank)
        shares |= engine.config.tied and not engine.is_critic and layout.pp > 1 and stage in (0, layout.pp - 1)
        if engine.is_drawn:
            size = drawing_bytes(
                engine.config, layout, pp_rank=stage, is_critic=engine.is_critic, itemsize=engine.itemsize
            )
            drawn = max(drawn, size)
    processes = len(scene.processes)
    if scene.on_gpu:
        process = processes * _BEGIN_BYTES + shares * _NCCL_BYTES
    else:
        held = sum(engine.states(engine.stage_of(rank)).total for engine in scene.engines)
        process = processes * _CPU_RANK_BYTES + held
    return {_RANKS: process, "random weights": drawn}


def _other_processes(scene: Scene) -> dict[str, float]:
    """Return what processes other than trainer ranks take of the first node, and the object store."""
    batch = scene.sequences * scene.longest * scene.token_bytes
    parts = {"driver": _DRIVER_BYTES if scene.on_gpu else _CPU_DRIVER_BYTES}
    if (servers := scene.servers) is None:
        return parts
    parts["rollout"] = _ROLLOUT_BYTES if scene.on_gpu else _CPU_ROLLOUT_BYTES
    # Of a batch, one copy is in the object store, and one is leased; as many are sampled as staleness allows.
    parts["episodes"] = float(batch * (2 + (1 + scene.max_staleness if scene.keeps_episodes else 0)))
    has_gpus = servers.on_gpu and scene.on_gpu and not scene.shares_gpus
    room = scene.n_gpus_per_node - (len(scene.ranks_of_node) if has_gpus else 0)  # GPUs beside the trainer's
    parts["servers"] = 0.0
    for one in (servers, servers.of_auxiliary):
        if one is not None:
            each = _SERVER_BYTES if one.on_gpu else _CPU_GENERATOR_BYTES + server_weights(one)
            number = min(one.layout.world_size, room)
            parts["servers"] += number * each
            room -= number
    if scene.keeps_weights:
        parts["copy of the weights"] = float(scene.actor.whole_weights)
    return parts


def _pinned(scene: Scene) -> dict[str, float]:
    """Return what ranks of the first node hold in host memory during the whole run."""
    parts = sums(_pinned_by_rank(scene, rank) for rank in scene.ranks_of_node)
    if scene.writes_checkpoints:
        parts["recover checkpoint"] = sum(
            min(piece.num_ranks, ranks) * (page_locked(piece.num_bytes) if scene.on_gpu else piece.num_bytes)
            for engine in scene.engines if engine.trains
            for stage, ranks in Counter(engine.stage_of(rank) for rank in scene.ranks_of_node).items()
            for piece in _pieces(engine, stage)
        )  # fmt: skip
    return parts


def _pinned_by_rank(scene: Scene, rank: int) -> dict[str, float]:
    offloaded = away = 0.0
    for engine in scene.engines:
        states = engine.states(engine.stage_of(rank))
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


def host_limit(scene: Scene, engine: Engine) -> float | None:
    """Return the bytes of host memory that activations of a rank may take, as the engine will find them; None where
    that of a node is not known."""
    if not scene.on_gpu:
        return 0.0
    if engine.host_gib is not None:
        return engine.host_gib * GIB
    if scene.host_bytes is None:
        return None
    ranks = len(scene.ranks_of_node)
    taken = sum((_other_processes(scene) | _pinned(scene)).values()) + ranks * len(scene.processes) * _RANK_BYTES
    return SHARE_OF_HOST * max(0.0, scene.host_bytes - taken) / ranks


def sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums by purpose."""
    total: dict[str, float] = {}
    for each in parts:
        for name, size in each.items():
            total[name] = total.get(name, 0.0) + size
    return total
