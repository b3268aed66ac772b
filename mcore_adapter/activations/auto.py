"""The least recomputation that fits into the memory of the device, chosen before an update and corrected by what it
used: recompute="auto".

Invariant: all ranks of a pipeline stage have the same choice; they agree on the smallest limit and the largest peak.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn

from mcore_adapter.activations.estimate import Choice, UpdateShape, choose, in_flight
from mcore_adapter.device import Device
from mcore_adapter.models.transformer_config import layers_of_chunks
from mcore_adapter.parallel import ParallelState
from mcore_adapter.recompute import recompute_layers
from mcore_adapter.settings import LEVELS
from model_specs.config import ModelConfig

logger = logging.getLogger(__name__)

SPARE = 0.08
"""Share of the memory that is left to fragmentation, where no limit is given."""
CORRECTIONS = 2
"""Measured updates after which a choice is made anew at most; each may cost the allocator its cache."""
ALIKE = 2.0
_MOST_CORRECTION = 3.0
_MORE_AFTER_FAILURE = 1.3
_SHARE_OF_HOST = 0.6  # of what is available before the first update
_CONTROL_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
GIB = 2**30


@dataclass
class _Measuring:
    """A choice whose peak is not known yet."""

    held: float  # bytes before the update
    limit: float  # of activations
    estimate: float


class AutoRecompute:
    """Chooses what the layers of `chunks` recompute. Methods are collective, with the same arguments on all ranks."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        config: ModelConfig,
        *,
        parallel: ParallelState,
        device: Device,
        itemsize: int,
        is_critic: bool,
        limit_gib: float | None,
        pending_bytes: Callable[[], float],
    ) -> None:
        """`limit_gib`: of the memory that this process uses in an update; None: what is free, but for SPARE.
        `pending_bytes`: what the optimizer will allocate in its first step."""
        self._chunks, self._parallel, self._device = chunks, parallel, device
        self._limit_gib, self._pending_bytes = limit_gib, pending_bytes
        layout = parallel.layout
        own = layers_of_chunks(config.num_layers, layout)[parallel.pp_rank :: layout.pp]
        self._fixed = dict(
            config=config, layout=layout, itemsize=itemsize, layers=max(own, key=len),
            has_head=parallel.is_last_stage, is_critic=is_critic,
        )  # fmt: skip
        self._shape: UpdateShape | None = None
        self._correction, self._corrections_left = 1.0, CORRECTIONS
        self._measuring: _Measuring | None = None
        self._on_host: float | None = None
        self.choice: Choice | None = None

    def prepare(self, tokens: int, num_microbatches: int) -> None:
        """Choose for an update whose largest microbatch has so many tokens, unless the present choice is for as many,
        or for less than ALIKE times as many."""
        passes = in_flight(self._parallel.layout, self._parallel.pp_rank, num_microbatches)
        now = self._shape
        if (
            now is None
            or not now.tokens / ALIKE < tokens <= now.tokens
            or not now.in_flight / ALIKE < passes <= now.in_flight
        ):
            if now is not None and tokens > ALIKE * now.tokens:
                self._correction = max(1.0, self._correction)  # what small microbatches take less says little
            self._shape = UpdateShape(tokens=tokens, in_flight=passes, **self._fixed)  # type: ignore[arg-type]
            self._corrections_left = CORRECTIONS
            self._choose("estimated")

    def observe(self) -> None:
        """Compare the peak of the update with the estimate, and choose anew by it."""
        if self._measuring is None or self._shape is None or self.choice is None:
            return
        seen, self._measuring = self._measuring, None
        peak = self._agree(self._device.memory_stats()["peak_gib"] * GIB - seen.held, dist.ReduceOp.MAX)
        self._correction *= min(max(peak / seen.estimate, 1 / _MOST_CORRECTION), _MOST_CORRECTION)
        logger.info(
            "gradient checkpointing: %s; activations %.1f GiB, estimated %.1f, limit %.1f, beside %.1f of weights, "
            "gradients and optimizer",
            self.choice, peak / GIB, seen.estimate / GIB, seen.limit / GIB, seen.held / GIB,
        )  # fmt: skip
        if self._corrections_left:
            self._corrections_left -= 1
            self._choose("measured")

    def retreat(self) -> bool:
        """Recompute more after memory ran out; return False where there is no more."""
        assert self._shape is not None and self.choice is not None, "an update precedes its failure"
        self._measuring = None
        if all(level == LEVELS[-1] for level in self.choice.levels):
            return False
        self._correction *= _MORE_AFTER_FAILURE
        self._corrections_left = 0
        before = self.choice.levels
        self._choose("after memory ran out")
        while self.choice.levels == before:
            self._correction *= _MORE_AFTER_FAILURE
            self._choose("after memory ran out")
        return True

    def _choose(self, why: str) -> None:
        assert self._shape is not None, "prepare() was called"
        held = self._device.memory_stats()["allocated_gib"] * GIB
        limit = self._limit(held) - held - self._pending_bytes()
        limit = self._agree(limit, dist.ReduceOp.MIN)
        on_host = self._agree(self._host_limit(), dist.ReduceOp.MIN)
        before = self.choice
        self.choice = choose(self._shape, limit, host_limit_bytes=on_host, correction=self._correction)
        recompute_layers(self._chunks, self.choice.levels)
        if before is not None and before.levels == self.choice.levels:
            return
        logger.info(
            "gradient checkpointing: auto, %s for microbatches of %d tokens: %s; activations %.1f GiB, limit %.1f",
            why, self._shape.tokens, self.choice, self.choice.activation_bytes / GIB, limit / GIB,
        )  # fmt: skip
        if not self.choice.fits:
            logger.warning("gradient checkpointing: auto expects more memory than there is, with all recomputed")
        if why == "after memory ran out":
            return
        self._device.forget_peak()
        self._measuring = _Measuring(held, limit, self.choice.activation_bytes)

    def _limit(self, held: float) -> float:
        if self._limit_gib is not None:
            return self._limit_gib * GIB
        return (1 - SPARE) * (held + self._device.memory_stats()["available_gib"] * GIB)

    def _host_limit(self) -> float:
        """Return the bytes of the host that activations may take, as much for every rank that may be there."""
        if self._device.torch_device.type == "cpu":
            return 0.0  # it is the same memory
        if self._on_host is None:
            ranks = min(self._parallel.world_size, torch.accelerator.device_count())
            self._on_host = _SHARE_OF_HOST * _available_on_host() / ranks
        return self._on_host

    def _agree(self, value: float, how: dist.ReduceOp.RedOpType) -> float:
        """Return the smallest or largest value of the ranks of this stage."""
        layout = self._parallel.layout
        if self._parallel.world_size == 1:
            return value
        neutral = float("inf") if how == dist.ReduceOp.MIN else -float("inf")
        values = torch.full((layout.pp,), neutral, dtype=torch.float64, device=self._device.torch_device)
        values[self._parallel.pp_rank] = value
        dist.all_reduce(values, op=how)
        return float(values[self._parallel.pp_rank])


def _available_on_host() -> float:
    """Return the bytes of memory that this host, or the control group of this process, has left."""
    available = float(psutil.virtual_memory().available)
    for limit, used in _CONTROL_GROUPS:
        try:
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # no such version of control groups; "max"
            continue
        available = min(available, left)
    return available
