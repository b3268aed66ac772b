"""Do the layouts fill the cluster, and if not, what is the nearest thing that does?

Invariant: every suggestion made here is itself accepted on the cluster it is made for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from allocation.errors import AllocationError
from allocation.layout import GENERATOR_ROLE, TRAINER_ROLE, nearest_layout, nearest_layouts
from allocation.placement import Cluster
from allocation.suggestions import Checks, Layouts, first_accepted, nearest_generators, nearest_to

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
