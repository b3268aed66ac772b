"""Which ready slots a step trains on. Terms, admission rule and invariant: rollout/experience/admission.py.

OldestFirst: step i takes the b_i oldest ready slots, as soon as for every deadline d > i the slots of deadline <= d
that stay behind fit into the steps i+1..d. This keeps the invariant, because it is the condition that the step waits
for. The wait always ends: under the invariant the b_i outstanding slots of earliest deadline satisfy the condition once
they are finished, and slots in flight finish. No slot is dropped, and no slot overtakes an older one for being short:
a slow prompt is waited for, within its slack.
FirstFinished waits for no particular slot; the store masks tokens sampled before version i - S.
InOrder: step i takes the first b_i outstanding slots of the stream: without dropped slots, exactly the prompts that
nominally belong to it. They were started at i - S or later, by the rule of admission, so the bound holds; and every run
has the same batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from rollout.experience.base import Selection, StalenessInvariantError
from rollout.experience.schedule import Schedule
from rollout.experience.slots import PromptSlots


@dataclass(frozen=True)
class OldestFirst:
    """Takes the oldest slots, and waits for a slow one only if it could become late otherwise."""

    schedule: Schedule
    max_staleness: int

    def is_ready(self, slots: PromptSlots, step: int) -> bool:
        """Return whether the slots that stay behind fit into the steps before their deadlines."""
        size = self.schedule.batch_of(step)
        outstanding = finished = 0
        for version in sorted(slots.outstanding):
            deadline = version + self.max_staleness
            outstanding += slots.outstanding[version]
            finished += slots.finished[version]
            later_steps = self.schedule.consumed_before(deadline + 1) - self.schedule.consumed_before(step + 1)
            if outstanding - size > later_steps:
                raise StalenessInvariantError(
                    f"step {step}: {outstanding} prompts must be trained by step {deadline}, "
                    f"which has room for {size + later_steps}"
                )
            if outstanding - min(finished, size) > later_steps:
                return False
        return True

    def choose(self, slots: PromptSlots, step: int) -> list[int]:
        return _oldest(slots, self.schedule.batch_of(step))


@dataclass(frozen=True)
class FirstFinished:
    """Takes a batch as soon as enough slots are ready, the oldest of them first."""

    schedule: Schedule
    max_staleness: int

    def is_ready(self, slots: PromptSlots, step: int) -> bool:
        return len(slots.ready) >= self.schedule.batch_of(step)

    def choose(self, slots: PromptSlots, step: int) -> list[int]:
        return _oldest(slots, self.schedule.batch_of(step))


@dataclass(frozen=True)
class InOrder:
    """Takes the prompts of the step in stream order, whichever finished first."""

    schedule: Schedule
    max_staleness: int

    def is_ready(self, slots: PromptSlots, step: int) -> bool:
        chosen = self.choose(slots, step)
        return len(chosen) == self.schedule.batch_of(step) and all(position in slots.ready for position in chosen)

    def choose(self, slots: PromptSlots, step: int) -> list[int]:
        return heapq.nsmallest(self.schedule.batch_of(step), slots.started)


SELECTIONS: dict[str, Callable[[Schedule, int], Selection]] = {
    "oldest_first": OldestFirst,
    "first_finished": FirstFinished,
    "in_order": InOrder,
}
"""By name: called with the schedule and max_staleness."""


def _oldest(slots: PromptSlots, size: int) -> list[int]:
    return sorted(slots.ready, key=lambda position: (slots.started[position], position))[:size]
