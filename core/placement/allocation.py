"""From configuration to allocation: the string or the roles' device mappings, whichever is given, and the devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import cast

from allocation import (
    CPU,
    GPU,
    TRAINER_ROLE,
    Allocation,
    AllocationError,
    Backend,
    Checks,
    Device,
    DeviceDecision,
    DeviceMapping,
    UndecidedBackendError,
    parse,
    parse_device_mappings,
)
from core.config.experiments import ExperimentConfig
from core.placement.ray_address import joined_cluster
from rollout.inference.gpus import query_gpus
from rollout.inference.registry import BACKENDS, DEFAULT_BACKEND

_BY_MAPPING = ("", "manual")
_TRAINER_DEVICE = "launch.trainer_device"


def resolve_allocation(config: ExperimentConfig, checks: Checks | None = None) -> Allocation:
    """Return the slots and device of every role, and the reason. Raises AllocationError; the layouts that it suggests
    pass `checks`."""
    default = _Default(config)
    allocation = _placed(
        config,
        default_backend=default.backend_of_none if config.TRAINER_ONLY else default.backend,
        checks=None if checks is None else on_devices(config, checks),
    )
    return _on_devices(config, allocation, default)


def on_devices(config: ExperimentConfig, checks: Checks) -> Checks:
    """Return these checks, of allocations that have no devices yet."""

    def accepts(allocation: Allocation) -> bool:
        with suppress(AllocationError):  # of the devices: reported once the layouts fit
            allocation = _on_devices(config, allocation, _Default(config))
        return checks.accepts(allocation)

    return replace(checks, accepts=accepts)


def _on_devices(config: ExperimentConfig, allocation: Allocation, default: _Default) -> Allocation:
    """Return the allocation with the device of every role. Raises AllocationError."""
    if config.TRAINER_ONLY:
        trainer = default.trainer_alone()
        return allocation.with_devices(trainer, trainer)
    generator = _generator_device(config.generator_device, allocation.generator.backend)
    if default.reason:
        generator = replace(generator, reason=f"{default.reason}; {generator.reason}")
    return allocation.with_devices(generator, _trainer_device(config, generator))


def _placed(config: ExperimentConfig, *, checks: Checks | None, default_backend: Callable[[], Backend]) -> Allocation:
    mapped = {role: s for role, s in config.placed_roles.items() if s.device_mapping is not None}
    if not mapped:
        return parse(
            config.allocation_mode,
            n_nodes=config.n_nodes,
            n_gpus_per_node=config.n_gpus_per_node,
            default_backend=default_backend,
            trainer_only=config.TRAINER_ONLY,
            checks=checks,
        )
    # A default value is not the user's choice.
    if "allocation_mode" in config.model_fields_set and config.allocation_mode not in _BY_MAPPING:
        raise AllocationError(
            f"and {_key(config, next(iter(mapped)))}.device_mapping both define where roles run; keep one of them",
            value=config.allocation_mode,
            nearest="manual",
        )
    mappings: dict[str, DeviceMapping] = {role: (s.device_mapping or "", s.layout) for role, s in mapped.items()}
    try:
        return parse_device_mappings(
            mappings,
            n_nodes=config.n_nodes,
            n_gpus_per_node=config.n_gpus_per_node,
            default_backend=default_backend,
            checks=checks,
        )
    except AllocationError as error:
        role, dot, name = error.key.partition(".")
        raise AllocationError(
            error.rule, key=_key(config, role) + dot + name, value=error.value, nearest=error.nearest
        ) from None


def _key(config: ExperimentConfig, role: str) -> str:
    """Return the section of a role, as the user writes it."""
    return "allocation" if role == TRAINER_ROLE and config.TRAINER_ONLY else role


class _Default:
    """What a configuration leaves to the machine. With a joined cluster that is nothing: the GPUs of the machine that
    submits a run are not those that it runs on."""

    def __init__(self, config: ExperimentConfig) -> None:
        self._config = config
        self.reason = ""
        """Why backend() returned what it did; empty if it was not called."""

    def backend(self) -> Backend:
        """Return the generators' backend. Raises UndecidedBackendError."""
        if cluster := joined_cluster(self._config):
            raise UndecidedBackendError(
                f"names no backend for the generators, and the run joins a Ray cluster ({cluster}), whose GPUs cannot "
                "be seen from here; write the backend before the generators' layout",
                cast("list[Backend]", list(DEFAULT_BACKEND.values())),
            )
        device, machine = _of_this_machine()
        backend = cast(Backend, DEFAULT_BACKEND[device])
        self.reason = f"no backend is named and {machine}: {backend}"
        return backend

    def backend_of_none(self) -> Backend:
        """Return a placeholder backend for the allocation of a run that samples nothing."""
        return cast(Backend, DEFAULT_BACKEND[self.trainer_alone().device])

    def trainer_alone(self) -> DeviceDecision:
        """Return the trainer's device in a run without generators. Raises AllocationError."""
        requested = self._config.launch.trainer_device
        if requested != "auto":
            return DeviceDecision(requested, f"{_TRAINER_DEVICE}={requested}")
        if cluster := joined_cluster(self._config):
            raise AllocationError(
                f"looks at the GPUs of this machine, and the run joins a Ray cluster ({cluster}), whose GPUs cannot be "
                "seen from here",
                key=_TRAINER_DEVICE,
                value=requested,
                nearest=f"{GPU} or {CPU}",
            )
        if self._config.n_nodes > 1 and not _num_gpus():
            return DeviceDecision(GPU, f"n_nodes={self._config.n_nodes}: other machines than this one, without GPU")
        return DeviceDecision(*_of_this_machine())


def _of_this_machine() -> tuple[Device, str]:
    """Return the device of a run on this machine alone, and what that follows from."""
    num_gpus = _num_gpus()
    if not num_gpus:
        return CPU, "this machine has no GPU"
    return GPU, f"this machine has {num_gpus} GPU{'s' if num_gpus > 1 else ''}"


@cache
def _num_gpus() -> int:
    return len(query_gpus())


def _generator_device(requested: str, name: str) -> DeviceDecision:
    backend = BACKENDS[name]
    devices = backend.capabilities.devices
    if requested == "auto":
        place = "GPUs" if devices[0] == GPU else "the CPU"
        return DeviceDecision(devices[0], f"{backend.label}s run on {place}")
    if requested not in devices:
        raise AllocationError(
            f"{backend.label}s run on {' and '.join(devices)}", key="generator.device", value=requested, nearest="auto"
        )
    return DeviceDecision(cast(Device, requested), f"generator.device={requested}")


def _trainer_device(config: ExperimentConfig, generator: DeviceDecision) -> DeviceDecision:
    requested = config.launch.trainer_device
    if requested == "auto":
        return DeviceDecision(generator.device, f"{_TRAINER_DEVICE}=auto: where the generators compute")
    return DeviceDecision(requested, f"{_TRAINER_DEVICE}={requested}")
