"""From configuration to allocation: the string, or the device mappings of the roles, whichever is given."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from allocation import Allocation, AllocationError, Backend, DeviceMapping, parse, parse_device_mappings
from core.config import ExperimentConfig, PPOMATHConfig
from core.config_models import GenerationRoleConfig
from rollout.sglang_gpus import query_gpus

_BY_MAPPING = ("", "manual")


def placed_roles(config: ExperimentConfig) -> dict[str, GenerationRoleConfig]:
    """Section of each role that may have a device_mapping, by the role's name."""
    if isinstance(config, PPOMATHConfig):
        return {"actor_gen": config.actor_gen, **config.roles}
    return {"actor_train": config.allocation}


def resolve_allocation(config: ExperimentConfig) -> Allocation:
    """Where every role runs. A layout that names no generator means SGLang where this machine has GPUs, else the
    embedded generator. Raises AllocationError."""
    where: dict[str, Any] = {
        "n_nodes": config.n_nodes,
        "n_gpus_per_node": config.n_gpus_per_node,
        "default_backend": _default_backend(),
    }
    mapped = {role: s for role, s in placed_roles(config).items() if s.device_mapping is not None}
    if not mapped:
        return parse(config.allocation_mode, **where)
    if config.allocation_mode not in _BY_MAPPING:
        raise AllocationError(
            f"and {next(iter(mapped))}.device_mapping both say where roles run; keep one of them",
            value=config.allocation_mode,
            nearest="manual",
        )
    mappings: dict[str, DeviceMapping] = {role: (s.device_mapping or "", s.layout) for role, s in mapped.items()}
    return parse_device_mappings(mappings, **where)


def uses_gpus(allocation: Allocation, server_flags: Mapping[str, object] = {}) -> bool:
    """Servers need GPUs, unless their flags say device: cpu; the embedded and the mock generator do not."""
    return allocation.generator.backend == "sglang" and server_flags.get("device") != "cpu"


@cache
def _default_backend() -> Backend:
    return "sglang" if query_gpus() else "embedded"
