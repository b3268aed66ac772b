"""Whether a run fits, and which changes of its configuration would make it fit.

Invariant: what a change gives is read from the plan of the changed run.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby, islice

from allocation import AllocationError, ParallelLayout, batch_errors
from allocation.layout import divisors
from core.config.experiments import ExperimentConfig
from core.placement.rules import split_errors
from core.planning.memory import SAMPLING, MemoryPlan, plan_memory, smallest_total
from core.planning.scene import PlanError, Scene, chosen_gpu, scene_of
from core.planning.server_memory import CONTEXT_BYTES, GIB
from model_specs.config import ModelConfig

NODE_GPUS = 8
"""Of a node, where a configuration has one node of one or two, as by default."""
_MOST_GPUS, _MOST_EXPERT_RANKS = 4096, 64
_CONTEXT_TOKENS = 8192  # of a sequence on each context-parallel rank, at least


def gib(size: float) -> str:
    """Return bytes as a number of GiB, with one decimal below ten."""
    return f"{size / GIB:.{1 if size < 10 * GIB else 0}f}"


def smallest_trainer(scene: Scene) -> Scene | None:
    """Return the trainer of a scene on the smallest number of GPUs on which it fits with recomputation of whole layers
    in any layout, with the optimizer in host memory where it does not fit otherwise; None up to 4096."""
    alone = replace(scene, servers=None, host_bytes=None).with_engines(recompute="full")
    alone = replace(alone, n_gpus_per_node=max(NODE_GPUS, scene.n_gpus_per_node))
    layouts = sorted(trainer_layouts(alone, _MOST_GPUS), key=lambda layout: layout.world_size)
    for _, sized in groupby(layouts, key=lambda layout: layout.world_size):
        of_size = list(sized)
        for one in dict.fromkeys((alone, alone.with_engines(offload=True))):
            for layout in of_size:
                placed = one.in_layout(layout)
                if smallest_total(placed) <= scene.gpu.gib * GIB and plan_memory(placed).fits:
                    return placed
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


def trainer_layouts(scene: Scene, num_gpus: int) -> Iterator[ParallelLayout]:
    """Yield the layouts of the trainer on at most so many GPUs that divide the models and the batch."""
    moe = scene.actor.config.moe
    experts = [1] if moe is None else [n for n in divisors(moe.num_experts) if n <= _MOST_EXPERT_RANKS]
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8, 16):
            for cp in (1, 2, 4, 8):
                if tp * cp > scene.n_gpus_per_node or (cp > 1 and scene.longest < cp * _CONTEXT_TOKENS):
                    continue
                for dp in divisors(scene.sequences // scene.minibatches):
                    if tp * pp * cp * dp > num_gpus:
                        break
                    for ep in experts:
                        if dp * tp * cp % ep:
                            continue
                        layout = ParallelLayout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)
                        if not any(layout_errors(scene, layout)):
                            yield layout


def layout_errors(scene: Scene, layout: ParallelLayout) -> Iterator[AllocationError]:
    """Yield every way in which a layout of the trainer does not divide the models or the batch."""
    for engine in scene.engines:
        yield from split_errors(layout, "actor_train", engine.config, engine.name)
    yield from batch_errors(
        layout,
        "actor_train",
        train_bs_n_seqs=scene.prompts,
        group_size=scene.group_size,
        ppo_n_minibatches=scene.minibatches,
    )


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the configuration and the plan that follows."""

    keys: str
    """Overrides, as on the command line."""
    scene: Scene
    """With the change."""
    before: MemoryPlan
    plan: MemoryPlan
    of_host: bool = False
    """It is for host memory."""

    @property
    def helps(self) -> bool:
        """Whether that of which too little was there fits, if only just."""
        return not self.plan.host_missing if self.of_host else self.plan.trainer != "does not fit"

    @property
    def starts(self) -> bool:
        """Whether the whole run fits, if only just."""
        return self.plan.fits or self.plan.is_tight

    @property
    def host_gain(self) -> float:
        """Bytes of host memory that a node needs less."""
        return self.before.host_total - self.plan.host_total

    @property
    def words(self) -> str:
        """What it comes to: "fits" is of the whole run."""
        parts = [] if self.of_host else [f"needs {self.plan.peak.total / GIB:.1f} GiB"]
        if self.of_host or abs(self.host_gain) >= GIB:
            parts.append(f"{gib(abs(self.host_gain))} GiB {'less' if self.host_gain > 0 else 'more'} host memory")
        if not self.helps:
            return ", ".join([*parts, "does not fit"])
        state = f"the {'host fits' if self.of_host else f'trainer {self.plan.trainer}'}"
        return ", ".join([*parts, self.plan.trainer if self.starts else state])


def advice(scene: Scene, plan: MemoryPlan) -> list[Change]:
    """Return changes that lower the peak of a GPU, then those that lower host memory: of each the first that make it
    fit, cheapest first, or else those that lower it most; where the run fits with none of them, the first of both
    together with which it does. Empty where the run fits."""
    found: list[Change] = []
    if plan.peak.total > plan.limit:
        changes: list[Change] = []
        for keys, one in _changes(scene, plan):
            change = Change(keys=keys, scene=one, before=plan, plan=plan_memory(one))
            if change.plan.host_missing <= plan.host_missing and change.plan.peak.total < plan.peak.total:
                changes.append(change)
            if sum(one.plan.trainer == "fits" for one in changes) == _MOST_CHANGES:
                break
        fitting = [[one for one in changes if one.plan.trainer == state] for state in ("fits", "is tight")]
        lower = sorted(changes, key=lambda one: one.plan.peak.total)
        found += (fitting[0] or fitting[1] or lower)[:_MOST_CHANGES]
    if plan.host_missing:
        found += _host_changes(scene, plan)
        if not any(change.starts for change in found):
            found += list(islice(_together(found, plan), 1))
    return found


def _together(found: Sequence[Change], plan: MemoryPlan) -> Iterator[Change]:
    """Yield changes for GPUs with one more for host memory with which a run fits."""
    for change in found:
        if change.helps and not change.of_host:
            for more in _host_changes(change.scene, change.plan):
                if more.starts:
                    keys = {key.partition("=")[0]: key for key in f"{change.keys} {more.keys}".split()}
                    yield replace(more, keys=" ".join(keys.values()), before=plan, of_host=False)


def verdict(scene: Scene, plan: MemoryPlan, changes: Sequence[Change]) -> str:
    """Return whether the run fits and, where no change of advice() would help, the smallest number of GPUs."""
    problems = list(_gpu_problems(scene, plan, changes))
    if plan.host_missing:
        more = " Use nodes with more memory." if all(change.plan.host_missing for change in changes) else ""
        problems.append(
            f"{gib(plan.host_missing)} GiB of host memory are missing: a node needs about {gib(plan.host_total)}.{more}"
        )
    if problems:
        return f"It does not fit: {' '.join(problems)}"
    host = ""
    if plan.host_limit is None:
        host = f" A node needs about {gib(plan.host_total)} GiB of host memory."
    if not scene.on_gpu:
        return f"It fits: the trainer computes on the CPU, a rank with {plan.peak.allocated / GIB:.1f} GiB.{host}"
    return f"{_of_gpu(scene, plan)}{_of_worst_routing(scene)}{host}"


def _of_gpu(scene: Scene, plan: MemoryPlan) -> str:
    """Return how well a run fits on its GPUs that does."""
    peak = plan.peak
    if plan.is_tight:
        spare = plan.limit - peak.allocated - peak.beside
        return (
            f"It is tight: {spare / GIB:.1f} GiB remain for fragmentation in the {peak.name}, {peak.slack / GIB:.1f} "
            "are recommended."
        )
    if any(engine.recompute == "auto" and engine.trains for engine in scene.engines):
        return "It fits; gradient_checkpointing=auto uses the memory that is free."
    return f"It fits: {(plan.limit - peak.total) / GIB:.1f} GiB of a GPU remain."


def _of_worst_routing(scene: Scene) -> str:
    """Return whether a run that fits with balanced experts also does with the worst routing; empty without experts on
    several ranks."""
    if (worst := with_worst_routing(scene)) is None:
        return ""
    plan = plan_memory(worst)
    missing = (plan.peak.total - plan.limit) / GIB
    chosen = "if all tokens choose the experts of one rank"
    if missing <= 0:
        return f" With the worst routing, {chosen}, {-missing:.1f} remain."
    auto = {e for e in worst.engines if e.trains and e.recompute == "auto"}
    most = replace(worst, engines=tuple(replace(e, recompute="full") if e in auto else e for e in worst.engines))
    if auto and plan_memory(most).trainer != "does not fit":
        helps = " gradient_checkpointing=auto recomputes more after memory has run out, and then it fits."
    else:
        helps = "".join(f" {change.keys}: {change.words}." for change in advice(worst, plan)[:1])
    return f" With the worst routing, {chosen}, {missing:.1f} GiB are missing in the {plan.peak.name}.{helps}"


def with_worst_routing(scene: Scene) -> Scene | None:
    """Return the scene with all tokens at the experts of one rank; None without experts on several ranks."""
    if not any(e.trains and e.config.moe is not None and e.layout.ep > 1 for e in scene.engines):
        return None
    return scene.with_engines(has_worst_routing=True)


def _gpu_problems(scene: Scene, plan: MemoryPlan, changes: Sequence[Change]) -> Iterator[str]:
    """Yield why trainer and servers do not fit on their GPUs, and what helps beside changes of advice()."""
    peak = plan.peak
    if plan.trainer == "does not fit":
        yield f"{(peak.total - plan.limit) / GIB:.1f} GiB are missing in the {peak.name}."
        if not any(change.helps for change in changes if not change.of_host):
            if scene.shares_gpus and peak.parts["server"] > peak.allocated:
                yield "Use more tensor-parallel ranks (m) for the servers, or GPUs of their own (+)."
            else:
                yield needed_gpus(scene, smallest_trainer(scene))
    if problem := server_problem(plan):
        yield f"{problem}{f', or raise {_SHARE_KEY}' if scene.shares_gpus else ''}."


def server_problem(plan: MemoryPlan) -> str:
    """Return why the servers cannot start, and what helps; or nothing."""
    for one, name in ((plan.servers, "a server"), (plan.auxiliary, "a server of the auxiliary model")):
        if one is None or one.tokens > 0:
            continue
        if one.largest_share is not None:
            return (
                f"The share of {name} leaves too little of a GPU for graphs and activations; lower {_SHARE_KEY} to "
                f"{one.largest_share:g}"
            )
        if one.cache + one.graphs > 0:
            return f"The CUDA graphs of {name} leave no memory for its cache; lower generator.max_running"
        return (
            f"The weights of {name} leave no memory for its cache; use more tensor-parallel ranks (m) for the servers"
        )
    return ""


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
    rank = next(rank for rank in plan.ranks if rank.peak is plan.peak)
    needs = f"{plan.peak.name} of {plan.name_of(rank)} needs {plan.peak.total / GIB:.1f} of {gpu.gib:.1f} GiB"
    line = f"Memory of {gpu.name}: {needs}"
    if plan.servers is not None:
        line += f"; a server caches {plan.servers.tokens:,} tokens"
    return [f"{line}. {verdict(scene, plan, advice(scene, plan))} `slipstream plan` shows the parts."]


_MOST_CHANGES, _MOST_DOUBLINGS = 3, 3
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
    changed = [
        scene.with_engines(recompute="auto"),
        with_microbatches(scene, 0.5),
        scene.with_engines(recompute="full"),
    ]
    changed += [offloaded, offloaded.with_engines(recompute="auto")]
    for one in dict.fromkeys(changed):
        if keys := keys_of_engines(one, scene):
            yield " ".join(keys), one
    layouts = list(_other_layouts(scene))
    for change in ({}, {"recompute": "auto"}, {"recompute": "auto", "offload": True}):
        for other in layouts:
            one = other.with_engines(**change)
            yield " ".join([f"allocation_mode={mode_of(one)}", *keys_of_engines(one, scene)]), one


def _other_layouts(scene: Scene) -> Iterator[Scene]:
    """Yield the scene in layouts of as many ranks with fewer data-parallel ones, those with most of them first."""
    reached = {scene.actor.layout: scene}
    for _ in range(_MOST_DOUBLINGS):
        doubled = [_doubled(scene, layout, field) for layout in reached for field in ("tp", "pp", "cp")]
        reached = {one.actor.layout: one for one in doubled if one is not None}
        yield from sorted(reached.values(), key=_num_kinds)


_WITHOUT: tuple[Callable[[Scene], Scene], ...] = (
    lambda scene: replace(scene, engines=tuple(replace(e, host_gib=e.host_gib and 0.0) for e in scene.engines)),
    lambda scene: with_microbatches(scene, 0.5),
    lambda scene: scene.with_engines(recompute="full"),
    lambda scene: scene.with_engines(offload=False),
    lambda scene: replace(scene, keeps_episodes=False),
    lambda scene: replace(scene, writes_checkpoints=False),
)
"""Ways to take less host memory, from cheap to costly in time or safety; on the CPU activations are there too."""
_LEAST_GAIN = 0.05
"""Of the host memory that is missing: a way that gives less is not named."""


def _host_changes(scene: Scene, plan: MemoryPlan) -> list[Change]:
    """Return changes that take less host memory, and no more of a GPU than it has: those that suffice alone, or else
    the largest, and the first ones that suffice together, or all."""

    def changed(ways: Sequence[Callable[[Scene], Scene]]) -> Change:
        one = reduce(lambda before, way: way(before), ways, scene)
        keys = keys_of_engines(one, scene)
        if one.keeps_episodes != scene.keeps_episodes:
            keys.append("experience.store=sqlite experience.path=FILE")
        if one.writes_checkpoints != scene.writes_checkpoints:
            keys.append("recover_mode=disabled")
        return Change(keys=" ".join(keys), scene=one, before=plan, plan=plan_memory(one), of_host=True)

    most, least = max(plan.limit, plan.peak.total), _LEAST_GAIN * plan.host_missing
    alone = {way: changed([way]) for way in _WITHOUT}
    alone = {way: one for way, one in alone.items() if one.plan.peak.total <= most and one.host_gain > least}
    if fitting := [change for change in alone.values() if change.helps]:
        return fitting
    largest = sorted(alone.values(), key=lambda one: -one.host_gain)[:_MOST_CHANGES]
    together = [changed(list(alone)[:number]) for number in range(2, len(alone) + 1)]
    return largest + ([one for one in together if one.helps] or together[-1:])[:1]


def with_microbatches(scene: Scene, factor: float) -> Scene:
    """Return the scene with so many times the tokens of a microbatch, but no fewer than a longest sequence where it has
    so many."""
    engines = (replace(e, tokens=max(min(e.tokens, scene.longest), int(e.tokens * factor))) for e in scene.engines)
    return replace(scene, engines=tuple(engines))


_SECTIONS = {"model": "allocation", "ref": "ref_inf"}
"""Section of the microbatches of an engine, where it is not NAME_train."""


def keys_of_engines(scene: Scene, asked: Scene, *, with_level: bool = False) -> list[str]:
    """Return the overrides, as on the command line, that give the engines of `asked` the recomputation, offload and
    microbatches of `scene`. `with_level`: also of a recomputation that is the same."""
    keys = []
    for engine, before in zip(scene.engines, asked.engines, strict=True):
        name = engine.name
        if engine.host_gib != before.host_gib:
            keys.append(f"{name}.gradient_checkpointing_host_gib={engine.host_gib:g}")
        if engine.offload != before.offload:
            keys.append(f"{name}.optimizer.offload={str(engine.offload).lower()}")
        if engine.recompute != before.recompute or (with_level and engine.trains):
            level = {"full": "true", "none": "false"}.get(engine.recompute, engine.recompute)
            keys.append(f"{name}.gradient_checkpointing={level}")
        if engine.tokens != before.tokens and (name != "ref" or scene.servers is not None):  # DPO: that of the model
            keys.append(f"{_SECTIONS.get(name, f'{name}_train')}.mb_spec.max_tokens_per_mb={engine.tokens}")
    return keys


def _num_kinds(scene: Scene) -> int:
    """Return how many kinds of parallelism cut the model."""
    layout = scene.actor.layout
    return sum(size > 1 for size in (layout.tp, layout.pp, layout.cp))


def _doubled(scene: Scene, layout: ParallelLayout, field: str) -> Scene | None:
    """Return the scene with half the data-parallel ranks of a layout and twice those of another kind; None where its
    models cannot be split so."""
    try:
        other = replace(layout, dp=layout.dp // 2, **{field: getattr(layout, field) * 2})
    except AllocationError:
        return None  # experts do not divide among the ranks of a stage
    if layout.dp % 2 or other.tp * other.cp > max(scene.n_gpus_per_node, layout.tp * layout.cp):
        return None
    return None if any(layout_errors(scene, other)) else scene.in_layout(other)


def divides(config: ModelConfig, layout: ParallelLayout, role: str) -> bool:
    """Return whether a model can be split over such ranks."""
    return not split_errors(layout, role, config, path="")


def mode_of(scene: Scene) -> str:
    """Return allocation_mode of a run whose models of the trainer have one layout."""
    trainer, servers = scene.actor.layout, scene.servers
    if servers is None:
        return str(trainer)
    placed = replace(servers.layout, dp=servers.layout.dp + servers.num_auxiliary)
    return f"{servers.backend}.{placed}{'|' if scene.shares_gpus else '+'}{trainer}"
