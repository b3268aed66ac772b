"""Do the layouts fill the cluster, and if not, what is the nearest thing that does?

Invariant: every suggestion made here is itself accepted on the cluster it is made for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from allocation.errors import AllocationError
from allocation.layout import (
    GENERATOR_ROLE,
    TRAINER_ROLE,
    Backend,
    ParallelLayout,
    nearest_layout,
)
from allocation.placement import Cluster
from allocation.plan import format_layouts

MAX_SLOTS = 100_000
"""Largest cluster: a bound on what a typing error in n_nodes can make this package compute."""


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


def check_sizes(
    cluster: Cluster,
    backend: Backend,
    generator: ParallelLayout,
    trainer: Mapping[str, ParallelLayout],
    *,
    disaggregated: bool,
) -> None:
    """Raise AllocationError unless every slot is used and the roles that share slots are equally large."""
    sampling, training = generator.world_size, trainer[TRAINER_ROLE].world_size
    needed = sampling + training if disaggregated else training
    if needed != cluster.num_slots:
        raise AllocationError(
            f"needs {f'{sampling} + {training} = ' if disaggregated else ''}{needed} GPUs, but too "
            f"{'few' if needed > cluster.num_slots else 'many'} are available: n_nodes={cluster.n_nodes} x "
            f"n_gpus_per_node={cluster.n_gpus_per_node} = {cluster.num_slots}, and all must be used"
            + (" (without GPUs, n_gpus_per_node counts processes)" if backend == "embedded" else ""),
            nearest=_nearest_text(cluster, backend, generator, trainer, disaggregated=disaggregated)
            + (f", or {_nearest_cluster(cluster, needed)}" if needed <= MAX_SLOTS else ""),
        )
    for role, layout in trainer.items():
        if layout.world_size != training:
            raise AllocationError(
                f"{role}:{layout} has {layout.world_size} ranks and shares its slots with "
                f"{TRAINER_ROLE}:{trainer[TRAINER_ROLE]}, which has {training}",
                nearest=f"{role}:{nearest_layout(layout, training)}",
            )
    if not disaggregated and sampling != training:
        raise AllocationError(
            f"{GENERATOR_ROLE}:{generator} has {sampling} ranks and shares its slots with "
            f"{TRAINER_ROLE}:{trainer[TRAINER_ROLE]}, which has {training}",
            nearest=f"{backend}.{_nearest_generator(generator, training)}",
        )


def nearest_split(total: int, generator: ParallelLayout, trainer: ParallelLayout) -> tuple[int, int] | None:
    """Return world sizes that add up to `total` with both m, p and c unchanged, closest to the given ratio; or None."""
    replica, model = generator.tp * generator.pp, trainer.tp * trainer.pp * trainer.cp
    wanted = total * generator.world_size / (generator.world_size + trainer.world_size)
    fitting = [n for n in range(replica, total, replica) if (total - n) % model == 0]
    if not fitting:
        return None
    sampling = min(fitting, key=lambda n: abs(n - wanted))
    return sampling, total - sampling


def _nearest_text(
    cluster: Cluster,
    backend: Backend,
    generator: ParallelLayout,
    trainer: Mapping[str, ParallelLayout],
    *,
    disaggregated: bool,
) -> str:
    sampling = training = cluster.num_slots
    if disaggregated and cluster.num_slots > 1:
        # Where no data parallelism fits, halve the cluster and let m, p and c give way.
        half = cluster.num_slots // 2
        sampling, training = nearest_split(cluster.num_slots, generator, trainer[TRAINER_ROLE]) or (
            half,
            cluster.num_slots - half,
        )
    return format_layouts(
        backend,
        _nearest_generator(generator, sampling),
        {role: nearest_layout(layout, training) for role, layout in trainer.items()},
        disaggregated=disaggregated and cluster.num_slots > 1,
    )


def _nearest_generator(layout: ParallelLayout, world_size: int) -> ParallelLayout:
    if layout.tp == layout.pp == 1:
        return ParallelLayout(dp=world_size)
    fitted = nearest_layout(replace(layout, ep=1), world_size)
    return replace(fitted, ep=layout.ep if fitted.tp % layout.ep == 0 else 1)


def _nearest_cluster(cluster: Cluster, needed: int) -> str:
    if needed % cluster.n_gpus_per_node == 0:
        return f"n_nodes={needed // cluster.n_gpus_per_node}"
    if needed % cluster.n_nodes == 0:
        return f"n_gpus_per_node={needed // cluster.n_nodes}"
    return f"n_nodes=1 n_gpus_per_node={needed}"
