"""The result: `Allocation`, every role on its slots, and the text that stands for it.

Invariant: `RoleAllocation.slots` has one entry per rank, in rank order. For the roles that Megatron runs this is
Megatron's order (tp fastest, then cp, dp, pp); a generator's ranks go replica by replica (tp fastest, then pp, dp), so
that the slots of one server are neighbours.

Slots are flat numbers: node * n_gpus_per_node + gpu. The two pools of a disaggregated run are disjoint and cover the
cluster. A tensor-parallel group lies on one node whenever some split of the cluster into the two pools allows that for
all groups; so does, second, a whole server of the generator and the context-parallel ranks of a trainer's replica.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import NamedTuple

from allocation.layout import (
    CPU,
    GENERATOR_ROLE,
    GPU,
    MEGATRON_ROLES,
    ROLES,
    TRAINER_ROLE,
    Backend,
    Device,
    DeviceDecision,
    ParallelLayout,
    generator_layout_for,
)


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
    tensor = min(layout.tp, per_node)  # a group that is larger than a node has whole nodes
    return units if units == [tensor] else [*units, tensor]


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


FALLBACK = {
    "actor_inf": TRAINER_ROLE,
    "critic_train": TRAINER_ROLE,
    "critic_inf": "critic_train",
    "ref_inf": TRAINER_ROLE,
}
"""Whose layout a role takes where none is written for it."""
SAME_WEIGHTS = {"actor_inf": TRAINER_ROLE, "critic_inf": "critic_train"}
"""Roles that use the weights of a trained one, where these are."""


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

    def place(self, cluster: Cluster) -> Allocation:
        """Give every rank its slot; the sizes must fit (resolve.py)."""
        if self.disaggregated:
            others = [layout for role, layout in self.trainer.items() if role != TRAINER_ROLE]
            generator_pool, trainer_pool = split(cluster, self.generator, self.trainer[TRAINER_ROLE], others)
        else:
            generator_pool = trainer_pool = cluster.whole()
        slots = [Slot(node, gpu) for node in range(cluster.n_nodes) for gpu in range(cluster.n_gpus_per_node)]
        generators = tuple(slots[i] for i in generator_pool.order(self.generator, generator=True))
        roles = {GENERATOR_ROLE: RoleAllocation(GENERATOR_ROLE, self.backend, self.generator, generators)}
        orders: dict[ParallelLayout, tuple[Slot, ...]] = {}
        for role in MEGATRON_ROLES:
            layout = self.trainer[role]
            if layout not in orders:
                orders[layout] = tuple(slots[i] for i in trainer_pool.order(layout, generator=False))
            roles[role] = RoleAllocation(role, "megatron", layout, orders[layout])
        return Allocation(roles, cluster.n_nodes, cluster.n_gpus_per_node)

    def __str__(self) -> str:
        """Return the canonical text."""
        trainer = self.trainer
        named = [r for r in MEGATRON_ROLES if r == TRAINER_ROLE or trainer[r] != trainer[FALLBACK[r]]]
        alike = len(named) == 1
        side = str(trainer[TRAINER_ROLE]) if alike else ",".join(f"{role}:{trainer[role]}" for role in named)
        shared = generator_layout_for(trainer[TRAINER_ROLE], self.backend)
        if not self.disaggregated and alike and self.generator == shared:
            return f"{self.backend}.{side}"
        return f"{self.backend}.{self.generator}{'+' if self.disaggregated else '|'}{side}"


class Slot(NamedTuple):
    """One place for a process: a GPU of a node, or without GPUs the n-th process of a node."""

    node: int
    gpu: int


class AllocationRow(NamedTuple):
    """What is reported about a role at start-up: a line of the table, and below it the reason."""

    role: str
    backend: str
    layout: str
    device: str
    num_slots: int
    placement: str
    """Nodes and the slots used on each: 'nodes 0-7: 0-7; node 8: 0-3'."""
    tp_groups_across_nodes: int
    why: str
    """The reason for the device, and for a backend that the user did not name."""


@dataclass(frozen=True)
class RoleAllocation:
    """How one role is split and where it runs; `slots[r]` is the place of rank r."""

    role: str
    backend: Backend
    layout: ParallelLayout
    slots: tuple[Slot, ...]
    device: Device = CPU
    """Where its ranks compute; a slot is a GPU, or without GPUs a process."""
    reason: str = field(default="", compare=False)
    """Why this backend, and why this device."""

    @property
    def on_gpu(self) -> bool:
        return self.device == GPU

    @property
    def replicas(self) -> list[tuple[Slot, ...]]:
        """Of a generator: the slots of each replica (a server: pp stages of tp ranks), in the server's rank order."""
        size = self.layout.tp * self.layout.pp
        return [self.slots[i : i + size] for i in range(0, len(self.slots), size)]

    def split(self, last: int) -> tuple[RoleAllocation, RoleAllocation | None]:
        """Return a generator's replicas but the `last` ones, and those; None where `last` is 0."""
        if not last:
            return self, None
        first = self.layout.dp - last
        middle = first * self.layout.tp * self.layout.pp
        return (
            replace(self, layout=replace(self.layout, dp=first), slots=self.slots[:middle]),
            replace(self, layout=replace(self.layout, dp=last), slots=self.slots[middle:]),
        )

    @property
    def tp_groups_across_nodes(self) -> int:
        """Tensor-parallel groups with ranks on more than one node."""
        tp = self.layout.tp
        if tp == 1:
            return 0
        return sum(len({slot.node for slot in self.slots[i : i + tp]}) > 1 for i in range(0, len(self.slots), tp))

    def row(self) -> AllocationRow:
        return AllocationRow(
            role=self.role,
            backend=self.backend,
            layout=str(self.layout),
            device=self.device,
            num_slots=len(self.slots),
            placement=describe_slots(self.slots),
            tp_groups_across_nodes=self.tp_groups_across_nodes,
            why=self.reason,
        )


@dataclass(frozen=True)
class Allocation:
    """A whole run on a cluster of n_nodes x n_gpus_per_node slots: every role in `ROLES`, by name."""

    roles: Mapping[str, RoleAllocation]
    n_nodes: int
    n_gpus_per_node: int

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.n_nodes, self.n_gpus_per_node)

    @property
    def layouts(self) -> Layouts:
        """How the roles are split, without their places."""
        return Layouts(
            backend=self.generator.backend,
            generator=self.generator.layout,
            trainer={role: self.roles[role].layout for role in MEGATRON_ROLES},
            disaggregated=not self.colocated,
        )

    @property
    def generator(self) -> RoleAllocation:
        return self.roles[GENERATOR_ROLE]

    @property
    def trainer(self) -> RoleAllocation:
        return self.roles[TRAINER_ROLE]

    @property
    def colocated(self) -> bool:
        """True where the generator and the trainer share at least one slot."""
        return not set(self.generator.slots).isdisjoint(self.trainer.slots)

    @property
    def shares_gpus(self) -> bool:
        """True where generator and trainer compute on the same GPUs, and so take turns on them."""
        return self.colocated and self.generator.on_gpu and self.trainer.on_gpu

    @property
    def gpu_slots(self) -> list[Slot]:
        """The GPUs that some role computes on, in order."""
        return sorted({slot for role in self.roles.values() if role.on_gpu for slot in role.slots})

    def with_devices(self, generator: DeviceDecision, trainer: DeviceDecision) -> Allocation:
        """Return the same places with the device of the generator, and that of every other role."""
        decided = {role: generator if role == GENERATOR_ROLE else trainer for role in self.roles}
        roles = {
            name: replace(role, device=decided[name].device, reason=decided[name].reason)
            for name, role in self.roles.items()
        }
        return replace(self, roles=roles)

    def only(self, *roles: str) -> Allocation:
        """Return the allocation of these roles alone."""
        return replace(self, roles={name: self.roles[name] for name in roles})

    def table(self) -> list[AllocationRow]:
        """Return rows for printing, the generator first."""
        return [self.roles[role].row() for role in ROLES]

    def __str__(self) -> str:
        """Return the canonical text, without devices: `parse` returns the same places, whatever its `default_backend`.

        An allocation that no text of the grammar stands for (an explicit device_mapping in an order of its own) is
        described instead, role by role: 'actor_gen=sglang.d8m1p1 on node 1: 0-7, actor_train=...'.
        """
        sizes = {layout.world_size for layout in self.layouts.trainer.values()}
        filled = len(self.trainer.slots) + (len(self.generator.slots) if self.layouts.disaggregated else 0)
        is_full = len(sizes) == 1 and filled == self.cluster.num_slots
        if is_full and _places(self.layouts.place(self.cluster)) == _places(self):
            return str(self.layouts)
        return ", ".join(
            f"{role}={'' if a.backend == 'megatron' else f'{a.backend}.'}{a.layout} on {describe_slots(a.slots)}"
            for role, a in self.roles.items()
            if role not in FALLBACK or replace(a, role=FALLBACK[role]) != self.roles[FALLBACK[role]]
        )


def _places(allocation: Allocation) -> list[tuple[Backend, ParallelLayout, tuple[Slot, ...]]]:
    return [(role.backend, role.layout, role.slots) for role in allocation.roles.values()]


def describe_slots(slots: Sequence[Slot]) -> str:
    """Return text such as 'nodes 0-7: 0-7; node 8: 0-3': nodes with the same slots are listed together."""
    by_node: dict[int, list[int]] = {}
    for node, gpu in slots:
        by_node.setdefault(node, []).append(gpu)
    used = [(node, spans(by_node[node])) for node in sorted(by_node)]
    parts = []
    for gpus, alike in groupby(used, key=lambda item: item[1]):
        nodes = [node for node, _ in alike]
        parts.append(f"node{'s' if len(nodes) > 1 else ''} {spans(nodes)}: {gpus}")
    return "; ".join(parts)


def spans(numbers: Sequence[int]) -> str:
    """Return '0-3,8' for the numbers 0, 1, 2, 3, 8 in any order."""
    parts = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda item: item[1] - item[0]):
        members = [n for _, n in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(parts)
