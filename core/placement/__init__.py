"""Where the processes of a run are: its allocation, the way of its weights, and the Ray cluster that it joins.

From configuration to allocation: the string or the roles' device mappings, whichever is given, and the devices. The
cluster is the one that a key or a variable names, or the one that runs on this node. A dry run uses it too: neither Ray
nor torch is imported.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import cast

from allocation import (
    CPU,
    GENERATOR_ROLE,
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
from core.config.experiments import ExperimentConfig, PPOMATHConfig
from rollout.inference.gpus import query_gpus
from rollout.inference.registry import BACKENDS, DEFAULT_BACKEND, Transport, choose_transport

RAY_ADDRESS = "RAY_ADDRESS"
"""Environment variable that Ray reads, too."""
AUTO, LOCAL = "auto", "local"
"""Ray's words for the cluster that runs on this node, and for a new one."""
CONNECT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class JoinedCluster:
    """A Ray cluster that a run joins."""

    source: str
    """Where the address comes from: launch.ray_address, RAY_ADDRESS, or `ray start`."""
    given: str
    """As it was written."""
    address: str | None
    """host:port; None where `auto` finds no cluster on this node."""

    def __str__(self) -> str:
        return f"{self.source}={self.given}" if self.source != STARTED else f"{self.source}, {self.given}"

    @property
    def host_and_port(self) -> tuple[str, int] | None:
        """The address in two parts; None where it is not host:port."""
        host, _, port = (self.address or "").removeprefix("ray://").rpartition(":")
        return (host.strip("[]"), int(port)) if host and port.isdigit() else None


def transport_of(config: PPOMATHConfig, allocation: Allocation) -> Transport:
    """Return the transport of the weights from trainer to generators. Raises ValueError where push.type does not reach
    them."""
    return choose_transport(config.push.type, allocation)


STARTED = "`ray start` on this node"


def joined_cluster(config: ExperimentConfig) -> JoinedCluster | None:
    """Return the Ray cluster that this run joins; None where the run starts its own on this machine.

    A run of several nodes joins the cluster of this node without a key: it cannot start one of several nodes."""
    for source, given in _given(config):
        if given == LOCAL:
            return None
        return JoinedCluster(source=source, given=given, address=running_ray() if given == AUTO else given)
    if config.n_nodes > 1 and not config.is_local and (address := running_ray()):
        return JoinedCluster(source=STARTED, given=address, address=address)
    return None


def _given(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    if config.launch.ray_address:
        yield "launch.ray_address", config.launch.ray_address
    inherited = None if config.is_local else os.environ.get(RAY_ADDRESS)
    if given := inherited or config.external_configs.variable(RAY_ADDRESS):
        yield RAY_ADDRESS, given


def running_ray() -> str | None:
    """Return host:port of the Ray cluster that `ray start` made this node a part of, if it still listens."""
    try:
        address = (Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster").read_text().strip()
    except OSError:
        return None
    found = JoinedCluster(source=STARTED, given=address, address=address)
    return address if connection_error(found) is None else None


def connection_error(cluster: JoinedCluster) -> str | None:
    """Return why no connection to the cluster's address can be made; None if one can, or if it is not host:port."""
    place = cluster.host_and_port
    if place is None:
        return None
    try:
        socket.create_connection(place, timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return f"nothing listens there ({type(error).__name__}: {error})"
    return None


def not_joined_note(config: ExperimentConfig) -> str | None:
    """Return a line about a Ray cluster on this node that the run does not join; None where there is none."""
    if joined_cluster(config) is not None or any(True for _ in _given(config)) or config.is_local:
        return None
    address = running_ray()
    return address and (
        f"A Ray cluster runs on this node ({address}); this run starts one of its own. To join it: RAY_ADDRESS=auto"
    )


_BY_MAPPING = ("", "manual")
_TRAINER_DEVICE = "launch.trainer_device"


def resolve_allocation(config: ExperimentConfig, checks: Checks | None = None) -> Allocation:
    """Return the slots and device of every role, and the reason. Raises AllocationError; the layouts that it suggests
    pass `checks`."""
    default = _Default(config)
    allocation = _placed(
        config,
        # Nothing is sampled: a placeholder.
        default_backend=(lambda: cast(Backend, DEFAULT_BACKEND[default.trainer_alone().device]))
        if config.TRAINER_ONLY
        else default.backend,
        checks=None if checks is None else on_devices(config, checks),
    )
    return _on_devices(config, allocation, default)


def started(config: ExperimentConfig, allocation: Allocation) -> Allocation:
    """Return the roles that this job starts: without generators in mode=train, those alone in others than both."""
    if config.job == "both":
        return allocation
    return allocation.only(*(config.roles if config.job == "train" else (GENERATOR_ROLE,)))


def on_devices(config: ExperimentConfig, checks: Checks) -> Checks:
    """Return these checks, of allocations that have no devices yet."""

    def accepts(allocation: Allocation) -> bool:
        with suppress(AllocationError):  # of the devices: reported once the layouts fit
            allocation = _on_devices(config, allocation, _Default(config))
        return checks.accepts(allocation)

    return replace(checks, accepts=accepts)


def _on_devices(config: ExperimentConfig, allocation: Allocation, default: _Default) -> Allocation:
    """Return the allocation with the device of every role. Raises AllocationError."""
    sampled = config.sampling
    if sampled is None:
        trainer = default.trainer_alone()
        return allocation.with_devices(trainer, trainer)
    generator = _generator_device(sampled.generator.device, allocation.generator.backend)
    if default.reason:
        generator = replace(generator, reason=f"{default.reason}; {generator.reason}")
    return allocation.with_devices(generator, _trainer_device(config, generator))


def _placed(config: ExperimentConfig, *, checks: Checks | None, default_backend: Callable[[], Backend]) -> Allocation:
    mapped = {role: s for role, s in config.placed_roles.items() if s.is_mapped}
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
