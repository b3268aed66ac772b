"""The device seam: one object determines where tensors are, how ranks communicate, and which leaf modules a layer is
made of.

Everything else in this package is the same code on every device. Invariant: nothing here touches hardware before
get_device() is called, and what runs Megatron runs inside `Device.activate()`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import nn

from mcore_adapter.settings import Fp8Recipe

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec

DeviceKind = Literal["auto", "cpu", "cuda"]


class Device(Protocol):
    """Where a rank computes. Two implementations: cpu.device.CpuDevice and cuda.device.CudaDevice."""

    torch_device: torch.device
    backend: str
    """Backend of torch.distributed."""
    shares_prompts: bool
    """Whether its core attention supports shared_prompts.SharedPromptParams."""
    overlaps_communication: bool
    """Whether collectives run beside the computation; where both need the same cores there is nothing to overlap."""
    fp8_recipes: tuple[Fp8Recipe, ...]
    """Those that it can compute."""
    has_grouped_products: bool
    """Whether one kernel computes the products of many experts: then their weights are stacked."""

    def setup(self) -> None:
        """Make this process ready: idempotent, before the first Megatron object and before process groups."""
        ...

    def activate(self) -> AbstractContextManager[None]:
        """Enter once per thread that builds or runs Megatron objects. Re-entrant."""
        ...

    def config_overrides(self) -> dict[str, object]:
        """Return the TransformerConfig fields that depend on the device: fusions, point-to-point modes,
        initialization."""
        ...

    def layer_spec(self, config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
        """Return how a layer is built, with that many experts; None: with a dense MLP."""
        ...

    @property
    def final_norm(self) -> type[nn.Module]:
        """The class of the norm after the last layer."""
        ...

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None: ...

    def memory_stats(self) -> dict[str, float]:
        """Return allocated_gib and peak_gib, which this process uses now and used at most, available_gib, which it can
        still allocate, and allocator_retries: how often, since the process began, memory ran out until the allocator
        released its cache."""
        ...

    def memory_holders(self) -> str:
        """Return a sentence that lists the processes that use the memory of this device, with their sizes."""
        ...

    def forget_peak(self) -> None:
        """Let peak_gib start anew, where that is possible."""
        ...


def get_device(kind: DeviceKind = "auto") -> Device:
    """Return the device of this process. "auto" takes a GPU where one is visible.

    Raises ValueError for an unknown kind and for "cuda" without a GPU.
    """
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        from mcore_adapter.cpu.device import CpuDevice

        return CpuDevice()
    if kind == "cuda":
        from mcore_adapter.cuda.device import CudaDevice

        return CudaDevice()
    raise ValueError(f"device={kind!r} must be one of auto, cpu, cuda")
