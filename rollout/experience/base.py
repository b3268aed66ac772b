"""The three protocols of experience: which prompts may start, what is stored, and what a step trains on.

A *prompt slot* is one position of the prompt stream, from the start of its sampling until the trainer has consumed its
group. Slots are numbered by position. A slot is *outstanding* until it is consumed, *in flight* while it is sampled,
and *ready* when its group is finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from rollout.experience.slots import PromptSlots
from rollout.types import Trajectory

OverAge = Literal["wait", "mask"]
Group = list[Trajectory]


class StalenessInvariantError(AssertionError):
    """Admission and selection together failed to keep the staleness bound (rollout/experience/admission.py)."""


class Admission(Protocol):
    """Decides which prompts may start."""

    def may_start(self, position: int, version: int) -> bool:
        """Return whether the prompt at `position`, dropped ones not counted, may be sampled from weights of `version`
        on."""
        ...


class Selection(Protocol):
    """Decides which ready slots a step trains on."""

    def is_ready(self, slots: PromptSlots, step: int) -> bool:
        """Return whether `choose` can be called. At least batch_of(step) slots are ready.

        Raises StalenessInvariantError when no batch can keep the bound."""
        ...

    def choose(self, slots: PromptSlots, step: int) -> list[int]:
        """Return the positions of the step's batch, in the order of the batch."""
        ...


class Store(Protocol):
    """Holds every outstanding slot. The producer calls `start`, `restart`, `put` and `fail`; the trainer's calls become
    `select` and `acknowledge`."""

    taken: list[int]
    """Positions of the slots that the last select() returned, in its order."""

    @property
    def num_dropped(self) -> int:
        """Slots whose groups were dropped, since the beginning of the stream."""
        ...

    def start(self, position: int, version: int) -> None:
        """Open the slot of `position`, which is sampled from weights of `version` on."""
        ...

    async def restart(self, position: int, version: int) -> None:
        """Count the slot of `position` as started at `version`: its sampling failed and begins again."""
        ...

    async def put(self, position: int, group: Group) -> None:
        """Store the finished group of a slot, or drop both."""
        ...

    async def drop(self, position: int) -> None:
        """Close a slot whose sampling failed: another prompt takes its place."""
        ...

    async def fail(self, error: BaseException) -> None:
        """Raise `error` from the waiting and every later select()."""
        ...

    async def select(self, step: int) -> list[Group]:
        """Wait for the batch of `step` and return it. `step` increases by one from call to call."""
        ...

    def acknowledge(self, step: int) -> None:
        """Count the batches of all steps before `step` as consumed."""
        ...

    def in_flight(self) -> list[int]:
        """Return the positions of slots that are started and not finished, in stream order."""
        ...

    def stats(self) -> dict[str, float]:
        """Return sizes, waits and ages, as metrics."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is not acknowledged, as plain types and arrays."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], *, keep_ready: bool = True) -> None:
        """Continue from `state`; without `keep_ready`, ready slots become in flight again."""
        ...

    def skip_to(self, step: int) -> None:
        """Begin at `step`, with no slot started."""
        ...
