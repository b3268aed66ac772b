"""The fastest allocation of a number of GPUs that fits in memory and passes the checks of a run.

Invariant: what is proposed has been resolved and checked by the rules that the start of a run applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from allocation import ParallelLayout, batch_errors, model_errors
from allocation.errors import divisors
from core.planning.gpus import PlanError
from core.planning.memory import GIB, MemoryPlan, plan_memory, plan_servers
from core.planning.rates import Calibration, StepTime, step_time
from core.planning.scene import Scene, Servers
from mcore_adapter.settings import Level
from model_specs.config import ModelConfig

_LEVELS: tuple[Level, ...] = ("selective", "linear", "full")
_DEGREES = (1, 2, 4, 8, 16)
_MOST_CHECKED = 400
_CONTEXT_TOKENS = 8192  # of a sequence on each context-parallel rank, at least


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """An allocation, with the recomputation of its trainer."""

    scene: Scene
    time: StepTime
    memory: MemoryPlan

    @property
    def mode(self) -> str:
        """allocation_mode."""
        assert self.scene.servers is not None, "a search has generators"
        trainer = str(self.scene.actor.layout)
        separator = "|" if self.scene.shares_gpus else "+"
        if self.scene.actor.layout.ep > 1:
            layout = self.scene.actor.layout
            attention = replace(layout, ep=1)
            trainer = f"(attn:{attention}|ffn:d{layout.expert_dp}m1p{layout.pp}e{layout.ep})"
        servers = self.scene.servers
        return f"{servers.backend}.{servers.layout}{separator}{trainer}"

    @property
    def overrides(self) -> tuple[str, ...]:
        """Keys to set, as on the command line."""
        level = {"selective": "selective", "linear": "linear", "full": "true", "none": "false"}
        name = self.scene.actor.name
        recompute = level.get(self.scene.actor.recompute, "auto")
        return (
            f"allocation_mode={self.mode}",
            f"n_nodes={self.scene.n_nodes}",
            f"n_gpus_per_node={self.scene.n_gpus_per_node}",
            f"{name}.gradient_checkpointing={recompute}",
            *((f"{name}.optimizer.offload=true",) if self.scene.actor.offload else ()),
        )

    @property
    def why(self) -> str:
        """What limits it, in a line."""
        t = self.time
        sides = f"update {t.update:.1f} s, log-probabilities {t.passes:.1f} s, generation {t.rollout:.1f} s"
        spare = (self.memory.limit - self.memory.peak.total) / GIB
        return (
            f"a step takes {t.step:.1f} s ({sides}), limited by the {t.limited_by}; {spare:.0f} GiB of a GPU are free"
        )


def search(
    scene: Scene,
    calibration: Calibration,
    *,
    num_gpus: int,
    mean_answer: float,
    accepts: Callable[[Proposal], bool],
    most: int = 3,
) -> list[Proposal]:
    """Return the fastest allocations on `num_gpus` GPUs, best first. `accepts`: whether a run would start with it.
    Raises PlanError for a number that equal nodes cannot have."""
    nodes = max(1, num_gpus // 8)
    if left := num_gpus % nodes:
        raise PlanError(f"--gpus {num_gpus}: {nodes} nodes cannot have as many GPUs each; write {num_gpus - left}")
    scene = replace(scene, n_nodes=nodes, n_gpus_per_node=num_gpus // nodes)
    candidates = sorted(
        _candidates(scene, calibration, num_gpus, mean_answer),
        key=lambda one: (-one[1].tokens_per_second, one[1].update + one[1].passes),
    )
    found: list[Proposal] = []
    for candidate, time in candidates[:_MOST_CHECKED]:
        memory = plan_memory(candidate)
        if not memory.fits:
            continue
        proposal = Proposal(scene=candidate, time=time, memory=memory)
        if all(_split(candidate) != _split(other.scene) for other in found) and accepts(proposal):
            found.append(proposal)
        if len(found) == most:
            break
    return found


def _split(scene: Scene) -> tuple[int, ParallelLayout | None]:
    """Return what proposals differ in: GPUs of the trainer, and servers."""
    return scene.actor.layout.world_size, scene.servers.layout if scene.servers else None


def _candidates(
    scene: Scene, calibration: Calibration, num_gpus: int, mean_answer: float
) -> Iterator[tuple[Scene, StepTime]]:
    """Yield allocations that divide models and batch and whose trainer fits, each with its time. Of the levels of
    recomputation, the first that fits is taken."""
    assert scene.servers is not None, "the caller has generators"
    sizes = list(_server_sizes(scene, scene.servers))
    fits: dict[tuple[ParallelLayout, bool], Scene | None] = {}
    for layout in _trainer_layouts(scene, num_gpus):
        for tp in sizes:
            rest = num_gpus - layout.world_size
            colocated, of_servers = rest == 0, rest or num_gpus
            if of_servers % tp or (colocated and scene.max_staleness > 0):
                continue
            count = of_servers // tp
            if (layout, colocated) not in fits:
                fits[layout, colocated] = _fitting(replace(scene, shares_gpus=colocated), layout)
            trainer = fits[layout, colocated]
            if trainer is None:
                continue
            servers = replace(scene.servers, layout=ParallelLayout(dp=count, tp=tp))
            placed = replace(trainer, servers=servers)
            time = step_time(placed, calibration, mean_answer=mean_answer)
            if time is not None:
                yield placed, time


def _fitting(scene: Scene, layout: ParallelLayout) -> Scene | None:
    """Return the scene with the trainer in this layout and the least recomputation that fits."""
    placed = scene.in_layout(layout)
    for offload in (False, True):
        for level in _LEVELS:
            leveled = placed.with_engines(recompute=level, offload=offload)
            if plan_memory(replace(leveled, servers=None)).fits:
                return leveled
    return None


def _server_sizes(scene: Scene, servers: Servers) -> Iterator[int]:
    """Yield the tensor-parallel ranks of servers that hold the model and a quarter of the longest sequences."""
    for tp in (1, 2, 4, 8):
        if tp > scene.n_gpus_per_node or not _divides(servers.config, ParallelLayout(tp=tp), "actor_gen"):
            continue
        plan = plan_servers(scene, replace(servers, layout=ParallelLayout(tp=tp)))
        if plan.tokens >= servers.max_running * scene.longest / 4:
            yield tp


def _trainer_layouts(scene: Scene, num_gpus: int) -> Iterator[ParallelLayout]:
    per_update = scene.sequences // scene.minibatches
    config = scene.actor.config
    experts = [1] if config.moe is None else [n for n in divisors(config.moe.num_experts) if n <= 64]
    for tp in (1, 2, 4, 8):
        for pp in _DEGREES:
            for cp in (1, 2, 4, 8):
                if tp * cp > scene.n_gpus_per_node or (cp > 1 and scene.longest < cp * _CONTEXT_TOKENS):
                    continue
                for dp in divisors(per_update):
                    world = tp * pp * cp * dp
                    if world > num_gpus:
                        break
                    for ep in experts:
                        layout = ParallelLayout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)
                        if dp * tp * cp % ep == 0 and _suits(scene, layout):
                            yield layout


def _suits(scene: Scene, layout: ParallelLayout) -> bool:
    if not all(_divides(engine.config, layout, "actor_train") for engine in scene.engines):
        return False
    return not batch_errors(
        layout,
        "actor_train",
        train_bs_n_seqs=scene.prompts,
        group_size=scene.group_size,
        ppo_n_minibatches=scene.minibatches,
    )


def _divides(config: ModelConfig, layout: ParallelLayout, role: str) -> bool:
    return not model_errors(
        layout, role, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, num_layers=config.num_layers,
        vocab_size=config.vocab_size, path="", intermediate_size=config.intermediate_size,
        num_experts=config.moe.num_experts if config.moe else 0,
    )  # fmt: skip
