"""Memory that ran out, as one error whatever the device reports.

Invariant: StepOutOfMemory with `repeatable` means that every rank raises it and nothing was changed anywhere.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from mcore_adapter.device import Device
    from mcore_adapter.parallel import ParallelState

T = TypeVar("T")

_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


class StepOutOfMemory(MemoryError):
    """Memory ran out in a pass over a batch. Sizes are in tokens, padding included."""

    def __init__(self, message: str, largest: int, longest: int, repeatable: bool) -> None:
        """`largest`: microbatch of the pass on any rank; `longest`: sequence of the batch."""
        super().__init__(message, largest, longest, repeatable)  # all of them: an exception travels as its arguments
        self.message, self.largest, self.longest, self.repeatable = message, largest, longest, repeatable

    def __str__(self) -> str:
        return self.message


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device or the host had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


@dataclass(frozen=True, kw_only=True)
class PassSizes:
    """Of a pass over a batch, in tokens, padding included."""

    largest: int  # microbatch of the pass on any rank
    longest: int  # sequence of the batch


class _AnotherRankRanOut(Exception):
    """This rank had memory for its gradients, another one had not."""


class MemoryGuard:
    """Runs the passes of an engine; each raises StepOutOfMemory where memory runs out in it, which alone computes the
    sizes."""

    def __init__(self, parallel: ParallelState, device: Device, *, overlap: bool) -> None:
        """`overlap`: gradients are reduced while others are still computed."""
        self._parallel, self._device = parallel, device
        layout = parallel.layout
        self._meet_late = layout.tp == layout.pp == layout.cp == layout.ep == 1 and not overlap
        self._agreed = True

    def gradients(self, call: Callable[[], T], sizes: Callable[[], PassSizes]) -> T:
        """Run a pass that is repeatable where ranks communicate only after they have their gradients: then all ranks
        raise or none does."""
        self._agreed = False
        try:
            return self._run(call, "training", sizes, repeatable=True)
        finally:
            self._agreed = True

    def all_have_gradients(self) -> None:
        """Agree, before gradients are reduced, that every rank has its gradients; collective. Ends the pass on all
        ranks otherwise."""
        if self._meet_late and not self._agree(True):
            raise _AnotherRankRanOut

    def update(self, call: Callable[[], T], sizes: Callable[[], PassSizes]) -> T:
        """Run an update, which is never repeatable: some weights may have changed."""
        return self._run(call, "the update", sizes, repeatable=False)

    def inference(self, call: Callable[[], T], sizes: Callable[[], PassSizes]) -> T:
        """Run a pass that is repeatable where no rank waits for another one before it has its results."""
        return self._run(call, "a pass without gradients", sizes, repeatable=True)

    def _run(self, call: Callable[[], T], what: str, sizes: Callable[[], PassSizes], *, repeatable: bool) -> T:
        failure = ""
        try:
            return call()
        except _AnotherRankRanOut:
            failure = "memory ran out on another rank"
        except (RuntimeError, MemoryError) as e:
            if not is_out_of_memory(e):
                raise
            failure = str(e).strip().partition("\n")[0] or type(e).__name__
        # Here the error is gone, and with it the frames that held on to the activations.
        gc.collect()
        self._device.empty_cache()
        repeatable = repeatable and (self._meet_late or self._parallel.world_size == 1)
        if repeatable and not self._agreed:
            self._agree(False)
        message, found = f"out of memory in {what} on rank {self._parallel.rank} ({failure})", sizes()
        raise StepOutOfMemory(message, found.largest, found.longest, repeatable)

    def _agree(self, well: bool) -> bool:
        """Return whether all ranks have succeeded."""
        self._agreed = True
        if self._parallel.world_size == 1:
            return well
        ran_out = torch.tensor([0.0 if well else 1.0], device=self._device.torch_device)
        dist.all_reduce(ran_out)
        return not ran_out.item()
