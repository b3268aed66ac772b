"""From configuration to allocation: the string, or the device mappings of the roles, whichever is given."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from allocation import (
    TRAINER_ROLE,
    Allocation,
    AllocationError,
    Backend,
    DeviceMapping,
    parse,
    parse_device_mappings,
)
from core.config.experiments import ExperimentConfig
from rollout.inference.sglang.gpus import query_gpus

_BY_MAPPING = ("", "manual")


def resolve_allocation(config: ExperimentConfig) -> Allocation:
    """Where every role runs. A layout that names no generator means SGLang where this machine has GPUs, else the
    embedded generator. Raises AllocationError."""
    where: dict[str, Any] = {
        "n_nodes": config.n_nodes,
        "n_gpus_per_node": config.n_gpus_per_node,
        "default_backend": _default_backend(),
    }
    mapped = {role: s for role, s in config.placed_roles.items() if s.device_mapping is not None}
    if not mapped:
        return parse(config.allocation_mode, trainer_only=config.TRAINER_ONLY, **where)
    # The default says nothing that anybody meant.
    if "allocation_mode" in config.model_fields_set and config.allocation_mode not in _BY_MAPPING:
        raise AllocationError(
            f"and {_key(config, next(iter(mapped)))}.device_mapping both say where roles run; keep one of them",
            value=config.allocation_mode,
            nearest="manual",
        )
    mappings: dict[str, DeviceMapping] = {role: (s.device_mapping or "", s.layout) for role, s in mapped.items()}
    try:
        return parse_device_mappings(mappings, **where)
    except AllocationError as error:
        role, dot, name = error.key.partition(".")
        raise AllocationError(
            error.rule, key=_key(config, role) + dot + name, value=error.value, nearest=error.nearest
        ) from None


def _key(config: ExperimentConfig, role: str) -> str:
    """The section of a role, as the user writes it."""
    return "allocation" if role == TRAINER_ROLE and config.TRAINER_ONLY else role


def uses_gpus(allocation: Allocation, server_flags: Mapping[str, object] = {}) -> bool:
    """Servers need GPUs, unless their flags say device: cpu; the embedded and the mock generator do not."""
    return allocation.generator.backend == "sglang" and server_flags.get("device") != "cpu"


@cache
def _default_backend() -> Backend:
    return "sglang" if query_gpus() else "embedded"
