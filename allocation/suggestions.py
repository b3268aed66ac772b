"""Allocations that lie near one that does not fit its cluster, the closest first.

Invariant: every layout suggested here fills the cluster that it is suggested for, and the caller accepts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from allocation.layout import GENERATOR_ROLE, MEGATRON_ROLES, TRAINER_ROLE, Backend, ParallelLayout, nearest_layouts
from allocation.placement import Cluster
from allocation.plan import Allocation, format_layouts, place

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
