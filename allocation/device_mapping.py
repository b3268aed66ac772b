"""Explicit slots for each role (`actor_train.device_mapping: list(range(0,8))`) instead of an allocation string.

Invariant: as in resolve.py, every slot of the cluster is used and every role has a place; here roles may overlap in
part, and rank r runs on entry r, in the order that the user wrote.

Mappings are lists, `range` (with steps), `list(...)` of one of them, and `+` between them; nothing is evaluated by
Python. The outcome is a list of at most `limit` numbers, or an AllocationError.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from allocation.checks import Checks, make_cluster
from allocation.layout import (
    GENERATOR_BACKENDS,
    GENERATOR_ROLE,
    MEGATRON_ROLES,
    ROLES,
    TRAINER_ROLE,
    AllocationError,
    Backend,
    ParallelLayout,
    check_generator_layout,
    chosen_backend,
    generator_layout_for,
    nearest_layouts,
)
from allocation.plan import FALLBACK, Allocation, Cluster, RoleAllocation, Slot, spans
from allocation.resolve import parse_role_layout, role_name

_NUMBER = r"\s*-?[0-9]{1,9}\s*"
_TERM = re.compile(
    rf"range\((?P<range>{_NUMBER}(?:,{_NUMBER}){{0,2}})\)|\[(?P<items>(?:{_NUMBER},)*(?:{_NUMBER}|\s*))\]"
)
_LIST_OF = re.compile(r"list\((.*)\)", re.DOTALL)
_EXAMPLE = "list(range(0,8))"


def parse_devices(mapping: str | Sequence[int], *, limit: int) -> list[int]:
    """Return the slot of each rank, in rank order: 'list(range(0,4)) + [6, 7]' -> [0, 1, 2, 3, 6, 7].

    `limit` is the number of slots in the cluster: a longer list cannot be meant. Raises AllocationError without key.
    """
    terms = map(_term, mapping.split("+")) if isinstance(mapping, str) else [mapping]
    devices: list[int] = []
    for numbers in terms:
        count = len(devices) + len(numbers)
        if count > limit:
            rule = f"names {count} slots or more, and n_nodes x n_gpus_per_node = {limit}"
            raise AllocationError(rule, f"list(range(0,{limit}))")
        devices += numbers
    return devices


def _term(text: str) -> Sequence[int]:
    """Return a list or a range; list(...) around it changes nothing."""
    inner = _LIST_OF.fullmatch(text.strip())
    found = _TERM.fullmatch(inner[1].strip() if inner else text.strip())
    if found is None:
        raise _wrong(f"expected a list, range(start, stop, step) or a sum of these, got {text.strip()[:40]!r}")
    if found["range"] is None:
        return [int(number) for number in found["items"].split(",") if number.strip()]
    arguments = [int(number) for number in found["range"].split(",")]
    if arguments[2:] == [0]:
        raise _wrong("the step of range must not be 0")
    return range(*arguments)


def _wrong(rule: str) -> AllocationError:
    return AllocationError(rule, _EXAMPLE)


DeviceMapping: TypeAlias = tuple[str | Sequence[int], ParallelLayout | str | None]
"""(slots in rank order, layout). None for the layout: data parallel over all of them."""


def parse_device_mappings(
    mappings: Mapping[str, DeviceMapping],
    *,
    n_nodes: int,
    n_gpus_per_node: int,
    default_backend: Backend | Callable[[], Backend] = "embedded",
    checks: Checks | None = None,
) -> Allocation:
    """Place every role on the slots written for it: {"actor_train": ("list(range(0,8))", layout), ...}.

    Slot i is GPU i % n_gpus_per_node of node i // n_gpus_per_node. Roles whose slots overlap are colocated. A role
    without a mapping takes that of the role it falls back to (plan.FALLBACK; the generator: the trainer's slots). The
    layout of actor_gen may name its backend ('sglang.d4m2p1'). Raises AllocationError; its key is the device_mapping
    or the layout. The layouts that it suggests suit `checks`.
    """
    cluster = make_cluster(n_nodes, n_gpus_per_node)
    slots = [Slot(node, gpu) for node in range(n_nodes) for gpu in range(n_gpus_per_node)]
    roles: dict[str, RoleAllocation] = {}
    used: set[int] = set()
    read: dict[str, list[int]] = {}
    for name, (mapping, layout) in mappings.items():
        try:
            role = _placed_role(name, roles)
            # Colocated roles repeat one text: read it once.
            devices = read.get(str(mapping)) or parse_devices(mapping, limit=cluster.num_slots)
            _check_devices(devices, cluster)
        except AllocationError as error:
            raise error.within(f"{name}.device_mapping", mapping) from None
        try:
            backend, degrees = _role_layout(role, layout, len(devices), default_backend)
        except AllocationError as error:
            raise error.within(f"{name}.layout", layout) from None
        _check_count(role, degrees, len(devices), checks or Checks(), key=f"{name}.device_mapping", value=mapping)
        read[str(mapping)] = devices
        used.update(devices)
        roles[role] = RoleAllocation(role, backend, degrees, tuple(slots[i] for i in devices))
    if TRAINER_ROLE not in roles:
        raise AllocationError(
            "missing, and every run has a trainer",
            key=f"{TRAINER_ROLE}.device_mapping",
            nearest=f"list(range(0,{cluster.num_slots}))",
        )
    _check_all_used(used, cluster, key=f"{name}.device_mapping")
    trainer = roles[TRAINER_ROLE]
    if GENERATOR_ROLE not in roles:
        backend = chosen_backend(default_backend, lambda choice: f"{GENERATOR_ROLE}.layout={choice}.{trainer.layout}")
        shared = generator_layout_for(trainer.layout, backend)
        roles[GENERATOR_ROLE] = RoleAllocation(GENERATOR_ROLE, backend, shared, trainer.slots)
    for role in MEGATRON_ROLES:
        if role not in roles:
            roles[role] = replace(roles[FALLBACK[role]], role=role)
    return Allocation({role: roles[role] for role in ROLES}, n_nodes, n_gpus_per_node)


def _placed_role(name: str, taken: Mapping[str, RoleAllocation]) -> str:
    role = role_name(name)
    if role not in ROLES:
        raise AllocationError(f"{name} has no slots of its own; roles: {', '.join(ROLES)}")
    if role in taken:
        raise AllocationError(f"{role} has two device mappings")
    return role


def _check_devices(devices: Sequence[int], cluster: Cluster) -> None:
    total = cluster.num_slots
    everything = f"list(range(0,{total}))"
    if not devices:
        raise AllocationError("names no slot", nearest=everything)
    if min(devices) < 0 or max(devices) >= total:
        wrong = max(devices) if max(devices) >= total else min(devices)
        raise AllocationError(
            f"slot {wrong} does not exist: n_nodes={cluster.n_nodes} x n_gpus_per_node={cluster.n_gpus_per_node} = "
            f"{total} slots, 0 to {total - 1}",
            nearest=f"{everything}, or n_nodes={wrong // cluster.n_gpus_per_node + 1}" if wrong > 0 else everything,
        )
    if len(set(devices)) != len(devices):
        twice = next(device for device, count in Counter(devices).items() if count > 1)
        raise AllocationError(f"slot {twice} is given to two ranks of the role", nearest=everything)


def _role_layout(
    role: str,
    layout: ParallelLayout | str | None,
    num_devices: int,
    default_backend: Backend | Callable[[], Backend],
) -> tuple[Backend, ParallelLayout]:
    backend, degrees = parse_role_layout(layout) if isinstance(layout, str) else (None, layout)
    degrees = degrees or ParallelLayout(dp=num_devices)
    if role == GENERATOR_ROLE:
        backend = backend or chosen_backend(default_backend, lambda choice: f"{choice}.{degrees}")
        if backend not in GENERATOR_BACKENDS:
            raise AllocationError(f"{role} runs on {', '.join(GENERATOR_BACKENDS)}, not on {backend}")
        check_generator_layout(degrees, backend)
    elif backend in GENERATOR_BACKENDS:
        raise AllocationError(f"{role} runs on megatron, not on {backend}", nearest=str(degrees))
    else:
        backend = "megatron"
    return backend, degrees


def _check_count(
    role: str, degrees: ParallelLayout, num_devices: int, checks: Checks, *, key: str, value: object
) -> None:
    if degrees.world_size != num_devices:
        near = checks.nearest(role, nearest_layouts(degrees, num_devices))
        raise AllocationError(
            f"lists {num_devices} slots for the {degrees.world_size} ranks of {degrees}",
            key=key,
            value=value,
            nearest=f"{degrees.world_size} slots" + ("" if near is None else f", or layout {near}"),
        )


def _check_all_used(used: set[int], cluster: Cluster, *, key: str) -> None:
    """Raise AllocationError for a slot that no role names: it would be idle for the whole run."""
    idle = sorted(set(range(cluster.num_slots)) - used)
    if not idle:
        return
    raise AllocationError(
        f"no role uses slots {spans(idle)} of the {cluster.num_slots} in n_nodes={cluster.n_nodes} x "
        f"n_gpus_per_node={cluster.n_gpus_per_node}; all must be used",
        key=key,
        nearest=f"extend a device_mapping to {cluster.num_slots - 1}",
    )
