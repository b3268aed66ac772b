"""The least recomputation that fits into the memory of the device, chosen before an update and corrected by what it
used: recompute="auto".

Invariant: all ranks of a pipeline stage have the same choice; they agree on the smallest limit and the largest peak.
"""

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from allocation import layers_of_chunks
from mcore_adapter.device import Device
from mcore_adapter.memory.available import available_on_host
from mcore_adapter.memory.estimate import SHARE_OF_HOST, SPARE, Choice, UpdateShape, activation_bytes, choose, in_flight
from mcore_adapter.memory.recompute import recompute_layers
from mcore_adapter.optimizer.training import TrainOptimizer
from mcore_adapter.parallel import ParallelState
from mcore_adapter.settings import LEVELS, Level
from model_specs.config import ModelConfig

logger = logging.getLogger(__name__)

GAIN = 0.05
"""Share of the limit that a measured peak must leave for less recomputation: a choice close to it may run out."""
CORRECTIONS = 2
"""Measured updates after which a choice is made anew, which may cost the allocator its cache. A choice that exceeds the
limit is always followed by another, which is measured too."""
ALIKE = 2.0
_MOST_CORRECTION = 3.0
_LESS_AFTER_FAILURE = 0.92  # of what the choice that failed would have taken
_LESS_AFTER_EXCESS = 0.98  # of what a choice that exceeded the limit was estimated to take
_LESS_GIB = 1.0  # free than before: a choice is made anew
GIB = 2**30


@dataclass(frozen=True)
class Peak:
    """Activations of an update, in bytes: measured, and estimated without correction."""

    choice: Choice
    measured: float
    estimated: float


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
        fp8: bool,
        limits: tuple[float | None, float | None],
        optimizer: TrainOptimizer,
    ) -> None:
        """`limits` in GiB: of the memory that this process uses in an update, None for what is free, but for SPARE; and
        of its activations in host memory, None for a share of what is free."""
        self._chunks, self._parallel, self._device = chunks, parallel, device
        (self._limit_gib, self._host_gib), self._optimizer = limits, optimizer
        layout = parallel.layout
        own = layers_of_chunks(config.num_layers, layout)[parallel.pp_rank :: layout.pp]
        self._fixed = dict(
            config=config, layout=layout, itemsize=itemsize, layers=max(own, key=len),
            has_head=parallel.is_last_stage, has_embedding=parallel.is_first_stage, is_critic=is_critic, fp8=fp8,
        )  # fmt: skip
        self._shape: UpdateShape | None = None
        self._tokens = 0  # of the largest microbatch under way; the choice may be for more
        self._microbatches = 0
        self._limit = 0.0  # of activations, when the choice was made
        self._share = 1.0  # of it that may be used: less after memory ran out
        self._correction, self._corrections_left = 1.0, CORRECTIONS
        self._exceeded = -1  # rank of the choice with the most recomputation that was measured above the limit
        self._measures = False  # the peak of the next update
        self._held = 0.0  # when that began
        self._on_host: float | None = None
        self.choice: Choice | None = None
        self.peak: Peak | None = None
        """Of the last update that was measured."""

    def prepare(self, tokens: int, num_microbatches: int) -> None:
        """Choose for an update whose largest microbatch has so many tokens, unless the present choice is for as many,
        or for less than ALIKE times as many, and there is as much memory."""
        layout, now = self._parallel.layout, self._shape
        tokens = self._tokens = _rounded(tokens)
        limit = self._agree(self._free(), dist.ReduceOp.MIN)
        # What all stages decide alike: as many microbatches as a stage can hold, whichever it is.
        microbatches = min(num_microbatches, 2 * layout.pp * layout.vpp)
        if now is None or not now.tokens / ALIKE < tokens <= now.tokens or microbatches != self._microbatches:
            if now is not None and tokens > ALIKE * now.tokens:
                self._correction = max(1.0, self._correction)  # savings of small microbatches do not carry over
            if now is not None and not now.tokens / ALIKE < tokens <= ALIKE * now.tokens:
                self._share, self._exceeded = 1.0, -1
            passes = in_flight(layout, self._parallel.pp_rank, num_microbatches)
            self._shape = UpdateShape(tokens=tokens, in_flight=passes, **self._fixed)  # type: ignore[arg-type]
            self._microbatches, self._corrections_left = microbatches, CORRECTIONS
            self._choose("estimated", limit)
            self._measures = True
        elif self._agree(limit - self._limit, dist.ReduceOp.MIN, of_stage=False) < -_LESS_GIB * GIB:
            self._choose("with less memory free", limit)
        if self._measures:
            self._device.forget_peak()
            self._held = self._device.memory_stats()["allocated_gib"] * GIB

    def observe(self) -> None:
        """Compare the peak of the update with the estimate, and choose anew by it."""
        assert self._shape is not None, "prepare() was called"
        if not self._measures or self.choice is None or self._tokens < self._shape.tokens:
            return  # a smaller microbatch does not test the estimate
        estimate = self._estimate(self.choice)
        peak = self._agree(self._device.memory_stats()["peak_gib"] * GIB - self._held, dist.ReduceOp.MAX)
        self.peak = Peak(self.choice, peak, estimate / self._correction)
        self._correction *= min(max(peak / estimate, 1 / _MOST_CORRECTION), _MOST_CORRECTION)
        held = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self._optimizer.held_bytes().items())
        logger.info(
            "gradient checkpointing: %s; activations %.1f GiB, estimated %.1f, limit %.1f, beside %.1f: %s",
            self.choice, peak / GIB, estimate / GIB, self._limit / GIB, self._held / GIB, held,
        )  # fmt: skip
        exceeds = peak > self._limit and not _is_most(self.choice.levels)
        if exceeds:
            self._exceeded = max(self._exceeded, _rank(self.choice.levels))
        of_any_stage = self._agree(float(exceeds), dist.ReduceOp.MAX, of_stage=False) > 0
        self._measures = of_any_stage or self._corrections_left > 0
        if self._measures:
            self._corrections_left = max(0, self._corrections_left - 1)
            less = _rank(self._fitting(self._limit, 1 - GAIN).levels) < _rank(self.choice.levels)
            if less or exceeds:
                self._choose("measured", self._limit, spare=GAIN)

    def retreat(self) -> bool:
        """Recompute more after memory ran out; return False where there is no more."""
        assert self.choice is not None, "an update precedes its failure"
        self._measures = False
        before = self.choice.levels
        if _is_most(before):
            return False
        self._corrections_left = 0
        self._share = min(self._share, self._estimate(self.choice) / self._limit)
        while _rank(self.choice.levels) <= _rank(before):
            self._share *= _LESS_AFTER_FAILURE
            self._choose("after memory ran out", self._limit)
        return True

    def _choose(self, why: str, limit: float, *, spare: float = 0.0) -> None:
        assert self._shape is not None, "prepare() was called"
        before, self._limit = self.choice, limit
        self.choice = self._fitting(limit, 1 - spare)
        recompute_layers(self._chunks, self.choice.levels)
        if before is not None and before.levels == self.choice.levels:
            return
        logger.info(
            "gradient checkpointing: auto, %s for microbatches of %d tokens: %s; activations %.1f GiB, limit %.1f",
            why, self._shape.tokens, self.choice, self.choice.activation_bytes / GIB, limit / GIB,
        )  # fmt: skip
        if not self.choice.fits:
            logger.warning(
                "gradient checkpointing: auto: with all layers recomputed, the estimate still exceeds the limit"
            )

    def _fitting(self, limit: float, share: float) -> Choice:
        """Return the least recomputation that fits into a share of the limit, or into what a failure has left of it,
        and is more than any that was measured above the limit."""
        assert self._shape is not None, "prepare() was called"
        if self._on_host is None:
            self._on_host = self._agree(self._host_limit(), dist.ReduceOp.MIN)
        usable = limit * min(share, self._share)
        while True:
            found = choose(self._shape, usable, host_limit_bytes=self._on_host, correction=self._correction)
            if _rank(found.levels) > self._exceeded or not found.fits:
                return found
            usable *= _LESS_AFTER_EXCESS

    def _estimate(self, choice: Choice) -> float:
        """Return the bytes of a choice by what is measured so far; choice.activation_bytes is by what was when it was
        made."""
        assert self._shape is not None, "prepare() was called"
        return self._correction * activation_bytes(self._shape, choice.levels)

    def _free(self) -> float:
        """Return the bytes that activations may take."""
        stats = self._device.memory_stats()
        limit = self._limit_gib or (1 - SPARE) * (stats["allocated_gib"] + stats["available_gib"])
        return (limit - stats["allocated_gib"]) * GIB - self._optimizer.pending_bytes()

    def _host_limit(self) -> float:
        """Return the bytes of the host that activations may take; unless given, as much for every rank on it."""
        if self._device.torch_device.type == "cpu":
            return 0.0  # it is the same memory
        if self._host_gib is not None:
            return self._host_gib * GIB
        hosts = [""] * self._parallel.world_size  # a rank sees its own device only, and cannot count those of its host
        dist.all_gather_object(hosts, socket.gethostname())
        return SHARE_OF_HOST * available_on_host() / hosts.count(socket.gethostname())

    def _agree(self, value: float, how: dist.ReduceOp.RedOpType, *, of_stage: bool = True) -> float:
        """Return the smallest or largest value of the ranks of this stage, or of all."""
        if self._parallel.world_size == 1:
            return value
        neutral = float("inf") if how == dist.ReduceOp.MIN else -float("inf")
        values = torch.full((self._parallel.layout.pp,), neutral, dtype=torch.float64)
        values[self._parallel.pp_rank] = value
        values = values.to(self._device.torch_device)
        dist.all_reduce(values, op=how)
        if of_stage:
            return float(values[self._parallel.pp_rank])
        return float(values.min() if how == dist.ReduceOp.MIN else values.max())


def _is_most(levels: Sequence[Level]) -> bool:
    """Return whether every layer is recomputed as a whole."""
    return all(level == LEVELS[-1] for level in levels)


def _rank(levels: Sequence[Level]) -> int:
    """Return a number that grows with what the layers compute again."""
    return sum(map(LEVELS.index, levels))


def _rounded(tokens: int) -> int:
    """Round up to 5 binary digits: batches whose largest microbatches differ a little have one choice."""
    step = 1 << max(0, tokens.bit_length() - 5)
    return -(-tokens // step) * step
