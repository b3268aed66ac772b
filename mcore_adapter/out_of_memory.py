"""Memory that ran out, as one error whatever the device says, and a way to make it run out in a test.

Invariant: StepOutOfMemory with `repeatable` means that every rank raises it and nothing was changed anywhere.
"""

from __future__ import annotations

import torch

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
    """Whether the device or the host had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)
