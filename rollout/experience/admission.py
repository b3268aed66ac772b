"""The staleness rule: how far ahead of the trainer prompts may start, and why no slot is ever late.

Step i (from 0) trains at version i and consumes b_i prompts. Prompts start in stream order, each in a prompt slot
(rollout/experience/base.py); prompt k nominally belongs to the step s(k) that would consume it if everything were
consumed in order. With max_staleness S a slot started at version v must be consumed by step v + S, its deadline; every
token of it is sampled at v or later.

Rule: prompt k may start at version v only if s(k) <= v + S.

Invariant (Hall's condition): before step i, for every d >= i, the outstanding slots of deadline <= d are at most
b_i + ... + b_d. Then the slots due at i fit into step i, and as the oldest are taken first no slot is ever late.
- Starting a slot at v keeps it. Its deadline v + S is the latest of all, so only d >= v + S is to be shown: all slots
  ever started have s(k) <= v + S, so there are at most b_0 + ... + b_(v+S) of them, of which b_0 + ... + b_(i-1) are
  consumed. Starting a slot again, later, only moves its deadline back.
- Dropping a slot (rollout/experience/filters.py) keeps it: there is one fewer. From then on the producer counts k
  without the dropped slots, and the sentence above holds for the slots that were started and not dropped.
- Consuming a batch keeps it: rollout/experience/selection.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout.experience.schedule import Schedule


@dataclass(frozen=True)
class StalenessAdmission:
    """Admits prompts of the next `max_staleness` steps beside those of the step that trains; ends with the run."""

    schedule: Schedule
    max_staleness: int
    """In steps, at least 0. 0: trainer and generators take turns."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness={self.max_staleness} must be 0 (synchronous) or more")

    def may_start(self, position: int, version: int) -> bool:
        """Return whether the prompt at `position`, dropped ones not counted, may be sampled from weights of `version`
        on."""
        in_stream = position < self.schedule.total_prompts
        return in_stream and self.schedule.step_of(position) <= version + self.max_staleness
