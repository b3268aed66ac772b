"""From one line of configuration to places: which ranks of which role run on which GPU of which node.

    parse("sglang.d4m2p1+d2m4p1", n_nodes=2, n_gpus_per_node=8) -> Allocation

Standard library only, no hardware probed: a slot is a GPU on a GPU cluster and a process without GPUs.
"""

from allocation.checks import Checks, batch_errors, model_errors, nearest_minibatches
from allocation.layout import (
    CPU,
    GENERATOR_BACKENDS,
    GENERATOR_ROLE,
    GPU,
    MEGATRON_ROLES,
    ROLES,
    TRAINER_ROLE,
    AllocationError,
    Backend,
    Device,
    DeviceChoice,
    DeviceDecision,
    ParallelLayout,
    UndecidedBackendError,
    layers_of_chunks,
    stages_of_layers,
)
from allocation.plan import Allocation, AllocationRow, RoleAllocation, Slot
from allocation.resolve import DeviceMapping, parse, parse_device_mappings

__all__ = [
    "CPU",
    "GENERATOR_BACKENDS",
    "GENERATOR_ROLE",
    "GPU",
    "MEGATRON_ROLES",
    "ROLES",
    "TRAINER_ROLE",
    "Allocation",
    "AllocationError",
    "UndecidedBackendError",
    "AllocationRow",
    "Backend",
    "Checks",
    "Device",
    "DeviceChoice",
    "DeviceDecision",
    "DeviceMapping",
    "ParallelLayout",
    "RoleAllocation",
    "Slot",
    "batch_errors",
    "layers_of_chunks",
    "model_errors",
    "nearest_minibatches",
    "parse",
    "parse_device_mappings",
    "stages_of_layers",
]
