"""Which slot each rank runs on, node by node; slots are flat numbers here: node * n_gpus_per_node + gpu.

Invariant: the two pools of a disaggregated run are disjoint and cover the cluster. A tensor-parallel group lies on one
node whenever some split of the cluster into the two pools allows that for all groups; so does, second, a whole server
of the generator and the context-parallel ranks of a trainer's replica.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from allocation.layout import ParallelLayout


@dataclass(frozen=True)
class Cluster:
    """n_nodes x n_gpus_per_node slots."""

    n_nodes: int
    n_gpus_per_node: int

    @property
    def num_slots(self) -> int:
        return self.n_nodes * self.n_gpus_per_node

    def whole(self) -> Pool:
        """Return the pool of a colocated run: every slot."""
        return Pool(self, tuple((0, self.n_gpus_per_node) for _ in range(self.n_nodes)))


@dataclass(frozen=True)
class Pool:
    """A set of slots: on node i those from `gpus[i][0]` up to `gpus[i][1]`, exclusive."""

    cluster: Cluster
    gpus: tuple[tuple[int, int], ...]

    def order(self, layout: ParallelLayout, *, generator: bool) -> list[int]:
        """Return the slot of each rank of `layout`, which must have as many ranks as the pool has slots."""
        per_node = self.cluster.n_gpus_per_node
        blocks = [range(node * per_node + first, node * per_node + end) for node, (first, end) in enumerate(self.gpus)]
        ordered: list[int] = []
        for unit in _units(layout, per_node, generator=generator):
            rest = []
            for block in blocks:
                whole = len(block) - len(block) % unit
                ordered.extend(block[:whole])
                rest.append(block[whole:])
            blocks = rest
        for block in blocks:
            ordered.extend(block)
        return ordered


def split(
    cluster: Cluster, generator: ParallelLayout, trainer: ParallelLayout, others: Sequence[ParallelLayout] = ()
) -> tuple[Pool, Pool]:
    """Return the generator's pool and the trainer's pool; their world sizes must add up to the cluster's slots.

    `others` are layouts of further roles on the trainer's pool. The generator takes the first GPUs of the first nodes.
    """
    per_node = cluster.n_gpus_per_node
    generator_units = _units(generator, per_node, generator=True)
    # The trainer's pool holds whole groups of every role on it if it holds multiples of all their sizes.
    sizes = [_units(layout, per_node, generator=False) for layout in (trainer, *others)]
    everybody = [math.lcm(*(units[0] for units in sizes)), math.lcm(*(units[-1] for units in sizes))]
    trainer_only = [sizes[0][-1]]
    counts = None
    for units in (everybody, trainer_only):
        for generator_unit, trainer_unit in product(generator_units, units):
            counts = counts or _exact_split(cluster, generator.world_size, generator_unit, trainer_unit)
    if counts is None:
        counts = _closest_split(cluster, trainer.world_size, trainer_only[0])
    return (
        Pool(cluster, tuple((0, count) for count in counts)),
        Pool(cluster, tuple((count, per_node) for count in counts)),
    )


def _units(layout: ParallelLayout, per_node: int, *, generator: bool) -> list[int]:
    """Return the sizes of the blocks of consecutive ranks that should stay on one node, best first."""
    larger = layout.tp * (layout.pp if generator else layout.cp)
    units = [larger] if larger <= per_node else []
    tensor = _fitting(layout.tp, per_node)
    return units if units == [tensor] else [*units, tensor]


def _fitting(tp: int, per_node: int) -> int:
    """Return the size of a tensor-parallel group, or whole nodes if it is larger than a node."""
    return min(tp, per_node)


def _exact_split(cluster: Cluster, generator_size: int, generator_unit: int, trainer_unit: int) -> list[int] | None:
    """Return the slots of the generator per node so that both sides hold only whole units on every node, or None.

    A node may give c slots to the generator if c % generator_unit == 0 and (n_gpus_per_node - c) % trainer_unit == 0:
    such c are low, low + step, ..., high, and the cluster needs n_nodes of them that sum to generator_size.
    """
    per_node = cluster.n_gpus_per_node
    allowed = [c for c in range(0, per_node + 1, generator_unit) if (per_node - c) % trainer_unit == 0]
    if not allowed:
        return None
    low, high = allowed[0], allowed[-1]
    spare = generator_size - low * cluster.n_nodes
    step = allowed[1] - low if len(allowed) > 1 else 1
    if spare % step or not 0 <= spare <= (high - low) * cluster.n_nodes:
        return None
    counts = []
    for _ in range(cluster.n_nodes):
        extra = min(spare, high - low)
        counts.append(low + extra)
        spare -= extra
    return counts


def _closest_split(cluster: Cluster, trainer_size: int, trainer_unit: int) -> list[int]:
    """Split as _exact_split where some group has to cross nodes: the trainer takes whole units from the last node
    backwards."""
    counts = [cluster.n_gpus_per_node] * cluster.n_nodes
    for unit in (trainer_unit, 1):
        for node in reversed(range(cluster.n_nodes)):
            taken = min(trainer_size, counts[node]) // unit * unit
            counts[node] -= taken
            trainer_size -= taken
    return counts
