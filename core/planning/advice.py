"""What to change where a run does not fit, and what each change gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from allocation import AllocationError
from core.config.experiments import ExperimentConfig
from core.planning.gpus import PlanError, chosen_gpu
from core.planning.memory import GIB, MemoryPlan, plan_memory, smallest_world
from core.planning.scene import Scene, scene_of


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
        """Whether the trainer does."""
        return self.plan.peak.total <= self.plan.limit


def advice(scene: Scene, plan: MemoryPlan) -> list[Change]:
    """Return changes that lower the peak: the first that makes the run fit, cheapest first, or else those that lower it
    most. Empty where the run fits."""
    if plan.peak.total <= plan.limit:
        return []
    changes = [Change(keys=keys, plan=plan_memory(changed)) for keys, changed in _changes(scene)]
    if fitting := [change for change in changes if change.fits]:
        return fitting[:3]
    lower = [change for change in changes if change.peak_gib < plan.peak.total / GIB]
    return sorted(lower, key=lambda change: change.peak_gib)[:3]


def verdict(scene: Scene, plan: MemoryPlan, changes: Sequence[Change]) -> str:
    """Return whether the run fits and, where no change of advice() would help, the smallest number of GPUs."""
    peak = plan.peak
    if not scene.on_gpu:
        return f"The trainer computes on the CPU: a rank needs about {peak.allocated / GIB:.1f} GiB of host memory."
    if plan.is_tight:
        spare = plan.limit - peak.allocated - peak.parts["context"]
        return (
            f"It is tight: {spare / GIB:.1f} GiB remain for fragmentation in the {peak.name}, "
            f"{(peak.total - peak.allocated - peak.parts['context']) / GIB:.1f} are recommended."
        )
    if plan.fits:
        if any(engine.recompute == "auto" and engine.trains for engine in scene.engines):
            return "It fits; gradient_checkpointing=auto uses the memory that is free."
        return f"It fits: {(plan.limit - peak.total) / GIB:.1f} GiB remain."
    problems = []
    if peak.total > plan.limit:
        problems.append(f"{(peak.total - plan.limit) / GIB:.1f} GiB are missing in the {peak.name}.")
        if not any(change.fits for change in changes):
            smallest = smallest_world(scene)
            need = (
                "No number of GPUs up to 4096 is enough"
                if smallest is None
                else f"The trainer needs at least {smallest}"
            )
            problems.append(f"{need} GPUs of {scene.gpu.gib:.0f} GiB with all layers recomputed.")
    if plan.server_problem:
        problems.append(f"{plan.server_problem}; use more tensor-parallel ranks (m) for the servers.")
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


def _changes(scene: Scene) -> Iterator[tuple[str, Scene]]:
    """Yield changes from cheap to costly in time."""
    name, engine = scene.actor.name, scene.actor
    shorter = max(scene.longest, engine.tokens // 2)
    section = "allocation" if name == "model" else f"{name}_train"
    if engine.recompute != "auto":
        yield f"{name}.gradient_checkpointing=auto", scene.with_engines(recompute="auto")
    if shorter < engine.tokens:
        yield f"{section}.mb_spec.max_tokens_per_mb={shorter}", scene.with_engines(tokens=shorter)
    if engine.recompute not in ("auto", "full"):
        yield f"{name}.gradient_checkpointing=true", scene.with_engines(recompute="full")
    if not engine.offload:
        both = scene.with_engines(offload=True)
        yield f"{name}.optimizer.offload=true", both
        keys = f"{name}.optimizer.offload=true {name}.gradient_checkpointing=auto"
        yield keys, both.with_engines(recompute="auto")
    for letter, field in (("m", "tp"), ("p", "pp"), ("c", "cp")):
        layout = engine.layout
        if layout.dp % 2 or (field == "tp" and (engine.config.num_kv_heads % (2 * layout.tp))):
            continue
        other = replace(layout, dp=layout.dp // 2, **{field: getattr(layout, field) * 2})
        engines = tuple(replace(e, layout=other) if e.layout == layout else e for e in scene.engines)
        yield f"the trainer as {other} ({letter} doubled)", replace(scene, engines=engines)
