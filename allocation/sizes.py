"""Do the layouts fill the cluster, and if not, what is the nearest thing that does?

Invariant: every suggestion made here is itself accepted on the cluster it is made for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from allocation.errors import AllocationError
from allocation.layout import (
    GENERATOR_ROLE,
    MEGATRON_ROLES,
    TRAINER_ROLE,
    Backend,
    ParallelLayout,
    nearest_layout,
    nearest_layouts,
)
from allocation.plan import Allocation, Cluster, format_layouts, place

_MOST_SLOTS_TRIED = 200_000
"""Slots of all allocations that are tried for one suggestion, which bounds its time to seconds."""


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What a suggestion has to pass beside the checks of this package: of the batch, the model, the backend."""

    suits: Callable[[str, ParallelLayout], bool] = lambda role, layout: True
    """Whether a role can have a layout; the cheaper check, made first."""
    accepts: Callable[[Allocation], bool] = lambda allocation: True
    """Whether an allocation passes every check."""

    def nearest(self, role: str, layouts: Iterable[ParallelLayout]) -> ParallelLayout | None:
        """Return the first of `layouts` that suits the role."""
        return next((layout for layout in layouts if self.suits(role, layout)), None)


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """What an allocation is made from, besides the cluster. `trainer` has each of MEGATRON_ROLES."""

    backend: Backend
    generator: ParallelLayout
    trainer: Mapping[str, ParallelLayout]
    disaggregated: bool

    @property
    def num_slots(self) -> int:
        """Slots that the layouts need."""
        training = self.trainer[TRAINER_ROLE].world_size
        return self.generator.world_size + training if self.disaggregated else training

    @property
    def are_of_one_size(self) -> bool:
        """Whether the roles that share slots have as many ranks as each other."""
        shared = [*self.trainer.values(), *([] if self.disaggregated else [self.generator])]
        return len({layout.world_size for layout in shared}) == 1

    def place(self, cluster: Cluster) -> Allocation:
        return place(
            cluster,
            backend=self.backend,
            generator=self.generator,
            trainer=self.trainer,
            disaggregated=self.disaggregated,
        )

    def __str__(self) -> str:
        return format_layouts(self.backend, self.generator, self.trainer, disaggregated=self.disaggregated)


def first_accepted(cluster: Cluster, candidates: Iterable[Layouts], checks: Checks) -> Layouts | None:
    """Return the first of the candidates, each of which fills the cluster, that is accepted; None if none is."""
    for layouts in islice(candidates, max(1, _MOST_SLOTS_TRIED // cluster.num_slots)):
        if checks.accepts(layouts.place(cluster)):
            return layouts
    return None


def nearest_to(cluster: Cluster, layouts: Layouts, checks: Checks) -> Layouts | None:
    """Return accepted layouts that fill the cluster and are close to `layouts`; None if there are none."""
    return first_accepted(cluster, _fill(cluster.num_slots, layouts, checks), checks)


def nearest_layouts_of(allocation: Allocation, checks: Checks) -> Layouts | None:
    """Return accepted layouts on the same cluster, close to those of an allocation whose layouts are refused."""
    layouts = Layouts(
        backend=allocation.generator.backend,
        generator=allocation.generator.layout,
        trainer={role: allocation.roles[role].layout for role in MEGATRON_ROLES},
        disaggregated=not allocation.colocated,
    )
    return nearest_to(Cluster(allocation.n_nodes, allocation.n_gpus_per_node), layouts, checks)


def _fill(total: int, layouts: Layouts, checks: Checks) -> Iterator[Layouts]:
    """Yield layouts of `total` slots whose roles suit them, those closest to `layouts` first."""
    if not layouts.disaggregated or total == 1:
        # A single slot is shared.
        yield from _of_sizes(replace(layouts, disaggregated=False), total, total, checks)
        return
    generator, trainer = layouts.generator, layouts.trainer[TRAINER_ROLE]
    replica, model = generator.tp * generator.pp, trainer.tp * trainer.pp * trainer.cp
    wanted = total * generator.world_size / (generator.world_size + trainer.world_size)
    kept = [n for n in range(replica, total, replica) if (total - n) % model == 0]
    for n in sorted(kept, key=lambda n: abs(n - wanted)):
        for found in _of_sizes(layouts, n, total - n, checks):
            if (found.generator.tp, found.generator.pp) == (generator.tp, generator.pp) and _same_model(found, trainer):
                yield found
    # Where no data parallelism fits, m, p and c give way: of halves first, if there is no ratio to keep.
    middle = wanted if kept else total // 2
    for n in sorted(range(1, total), key=lambda n: abs(n - middle)):
        yield from _of_sizes(layouts, n, total - n, checks)


def _same_model(layouts: Layouts, trainer: ParallelLayout) -> bool:
    found = layouts.trainer[TRAINER_ROLE]
    return (found.tp, found.pp, found.cp) == (trainer.tp, trainer.pp, trainer.cp)


def _of_sizes(layouts: Layouts, sampling: int, training: int, checks: Checks) -> Iterator[Layouts]:
    """Yield layouts for `sampling` slots of the generator and `training` slots of the trainer, the closest first."""
    written = layouts.trainer[TRAINER_ROLE]
    others = {role: layout for role, layout in layouts.trainer.items() if layout != written}
    fitted = {role: checks.nearest(role, nearest_layouts(layout, training)) for role, layout in others.items()}
    if None in fitted.values():
        return
    for near in nearest_layouts(written, training):
        # Roles without a layout of their own stay with the trainer.
        trainer = {role: fitted.get(role) or near for role in layouts.trainer}
        if not all(checks.suits(role, layout) for role, layout in trainer.items()):
            continue
        for generator in nearest_generators(layouts.generator, sampling):
            if checks.suits(GENERATOR_ROLE, generator):
                yield replace(layouts, generator=generator, trainer=trainer)


def nearest_generators(layout: ParallelLayout, world_size: int) -> Iterator[ParallelLayout]:
    """Yield the generator's layouts on exactly `world_size` ranks, those closest to `layout` first."""
    if layout.tp == layout.pp == 1:
        yield ParallelLayout(dp=world_size)
        return
    for fitted in nearest_layouts(replace(layout, ep=1), world_size):
        yield replace(fitted, ep=layout.ep if fitted.tp % layout.ep == 0 else 1)


MAX_SLOTS = 100_000
"""Largest cluster: a bound on what a typing error in n_nodes can make this package compute."""
_NO_LAYOUT = (
    "; no layout near this one passes the checks of batch, model and backend: change the batch, n_nodes or "
    "n_gpus_per_node"
)


def make_cluster(n_nodes: int, n_gpus_per_node: int) -> Cluster:
    """Build the cluster. Raises AllocationError for invalid counts."""
    for key, count in (("n_nodes", n_nodes), ("n_gpus_per_node", n_gpus_per_node)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise AllocationError("must be a whole number from 1 up", key=key, value=count, nearest="1")
    for key, count, other in (("n_gpus_per_node", n_gpus_per_node, 1), ("n_nodes", n_nodes, n_gpus_per_node)):
        if count * other > MAX_SLOTS:
            raise AllocationError(
                f"{count * other} GPUs are more than the {MAX_SLOTS} that a run may have",
                key=key,
                value=count,
                nearest=str(MAX_SLOTS // other),
            )
    return Cluster(n_nodes, n_gpus_per_node)


def check_sizes(cluster: Cluster, layouts: Layouts, checks: Checks) -> None:
    """Raise AllocationError unless every slot is used and the roles that share slots are equally large. What the error
    suggests passes `checks`."""
    _check_total(cluster, layouts, checks)
    training = layouts.trainer[TRAINER_ROLE].world_size
    for role, layout in layouts.trainer.items():
        if layout.world_size != training:
            near = first_accepted(cluster, _with_role(layouts, role, training), checks)
            raise AllocationError(
                f"{role}:{layout} has {layout.world_size} ranks and shares its slots with "
                f"{TRAINER_ROLE}:{layouts.trainer[TRAINER_ROLE]}, which has {training}" + ("" if near else _NO_LAYOUT),
                nearest=None if near is None else f"{role}:{near.trainer[role]}",
            )
    generator = layouts.generator
    if not layouts.disaggregated and generator.world_size != training:
        fitting = (replace(layouts, generator=near) for near in nearest_generators(generator, training))
        near = first_accepted(cluster, fitting, checks)
        raise AllocationError(
            f"{GENERATOR_ROLE}:{generator} has {generator.world_size} ranks and shares its slots with "
            f"{TRAINER_ROLE}:{layouts.trainer[TRAINER_ROLE]}, which has {training}" + ("" if near else _NO_LAYOUT),
            nearest=None if near is None else f"{near.backend}.{near.generator}",
        )


def _check_total(cluster: Cluster, layouts: Layouts, checks: Checks) -> None:
    needed = layouts.num_slots
    if needed == cluster.num_slots:
        return
    near = nearest_to(cluster, layouts, checks)
    ways = [] if near is None else [str(near)]
    counts = _nearest_cluster(cluster, needed)
    if needed <= MAX_SLOTS and layouts.are_of_one_size and checks.accepts(layouts.place(replace(cluster, **counts))):
        ways.append(" ".join(f"{key}={count}" for key, count in counts.items()))
    sampling, training = layouts.generator.world_size, layouts.trainer[TRAINER_ROLE].world_size
    raise AllocationError(
        f"needs {f'{sampling} + {training} = ' if layouts.disaggregated else ''}{needed} GPUs, but too "
        f"{'few' if needed > cluster.num_slots else 'many'} are available: n_nodes={cluster.n_nodes} x "
        f"n_gpus_per_node={cluster.n_gpus_per_node} = {cluster.num_slots}, and all must be used"
        + (" (without GPUs, n_gpus_per_node counts processes)" if layouts.backend == "embedded" else "")
        + ("" if ways else _NO_LAYOUT),
        nearest=", or ".join(ways) or None,
    )


def _with_role(layouts: Layouts, role: str, training: int) -> Iterator[Layouts]:
    """Yield the layouts with another one of `training` ranks for a role; the roles still to be checked fit too."""
    generator = layouts.generator
    if not layouts.disaggregated:
        generator = next(nearest_generators(generator, training))
    others = {name: nearest_layout(layout, training) for name, layout in layouts.trainer.items()}
    for near in nearest_layouts(layouts.trainer[role], training):
        yield replace(layouts, generator=generator, trainer={**others, role: near})


def _nearest_cluster(cluster: Cluster, needed: int) -> dict[str, int]:
    """Return the counts to change so that the cluster has `needed` slots."""
    if needed % cluster.n_gpus_per_node == 0:
        return {"n_nodes": needed // cluster.n_gpus_per_node}
    if needed % cluster.n_nodes == 0:
        return {"n_gpus_per_node": needed // cluster.n_nodes}
    return {"n_nodes": 1, "n_gpus_per_node": needed}
