"""Prompt slots in memory, from their start until the trainer has consumed them.

Invariant: a slot is outstanding, selected, or consumed. The batch of a step is selected when the trainer gets it and
consumed when that of a later step is requested, so a state taken in between still holds it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rollout.experience.ages import age_metrics, mask_over_age
from rollout.experience.base import Group, OverAge, Selection
from rollout.experience.filters import SpreadFilter
from rollout.experience.schedule import ENDLESS, Schedule
from rollout.experience.slots import PromptSlots
from rollout.types import Trajectory


@dataclass(kw_only=True)
class _Selected:
    """Batches that the trainer has and has not acknowledged."""

    step: int
    """The oldest of them."""
    slots: list[tuple[int, int, Group]] = field(default_factory=list)  # version at the start, position, group
    num_masked: int = 0


class MemoryStore:
    """Slots by position. One Condition: put(), restart() and fail() wake the one select() that waits."""

    def __init__(
        self,
        schedule: Schedule,
        selection: Selection,
        *,
        max_staleness: int,
        over_age: OverAge = "wait",
        spread: SpreadFilter | None = None,
    ) -> None:
        """`over_age`: "mask" masks the tokens of a batch that are older than `max_staleness` steps; with "wait" the
        selection must keep the bound, and a token above it raises StalenessInvariantError. `spread`: drops groups."""
        if over_age not in ("wait", "mask"):
            raise ValueError(f"over_age={over_age!r} must be 'wait' or 'mask'")
        self._schedule = schedule
        self._selection = selection
        self._max_staleness = max_staleness
        self._over_age = over_age
        self._spread = spread
        self.next_step = 0
        """The step that select() expects."""
        self.taken: list[int] = []
        self._slots = PromptSlots()
        self._selected = _Selected(step=0)
        self._changed = asyncio.Condition()
        self._error: BaseException | None = None
        self._num_masked = 0  # tokens of acknowledged batches
        self._num_skipped = 0  # slots whose sampling failed
        self._last: dict[str, float] = {}

    @property
    def num_dropped(self) -> int:
        """Slots whose groups were dropped, since the beginning of the stream."""
        return self._num_skipped + (self._spread.num_dropped if self._spread else 0)

    def start(self, position: int, version: int) -> None:
        """Open the slot of `position`, which is sampled from weights of `version` on."""
        self._slots.start(position, version)

    async def restart(self, position: int, version: int) -> None:
        """Count the slot of `position` as started at `version`, which may be all that select() waits for."""
        async with self._changed:
            self._slots.start(position, version)
            self._changed.notify_all()

    async def put(self, position: int, group: Group) -> None:
        """Store the finished group of a slot, or drop both."""
        async with self._changed:
            if self._spread and self._spread.drops(position, group):
                self._slots.drop(position)
            else:
                self._slots.finish(position, group)
            self._changed.notify_all()

    async def drop(self, position: int) -> None:
        """Close a slot whose sampling failed: another prompt takes its place."""
        async with self._changed:
            self._num_skipped += 1
            self._slots.drop(position)
            self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """Raise `error` from the waiting and every later select()."""
        async with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    async def select(self, step: int) -> list[Group]:
        """Return the groups that `step` trains on; wait for them. Acknowledges the steps before.

        Raises the error of fail(), ValueError on another step than the next, StalenessInvariantError.
        """
        size = self._schedule.batch_of(step)
        if step != self.next_step or not size:
            raise ValueError(f"take({step}): the next step is {self.next_step} of {self._num_steps()} in all")
        self.acknowledge(step)
        began = time.perf_counter()
        async with self._changed:
            await self._changed.wait_for(lambda: self._error is not None or len(self._slots.ready) >= size)
            enough = time.perf_counter()
            await self._changed.wait_for(lambda: self._error is not None or self._selection.is_ready(self._slots, step))
            if self._error is not None:
                raise self._error
            self.taken = self._selection.choose(self._slots, step)
            for position in self.taken:
                version, group = self._slots.remove(position)
                self._selected.slots.append((version, position, group))
            self.next_step += 1
        now = time.perf_counter()
        self._last = {"rollout/wait_seconds": now - began, "rollout/wait_for_oldest_seconds": now - enough}
        groups = [group for _, _, group in self._selected.slots]
        if self._over_age == "mask":
            groups = [[self._mask(trajectory, step) for trajectory in group] for group in groups]
        self._last |= age_metrics(groups, step, self._max_staleness)
        if self._spread:
            self._last |= self._spread.select(self.taken, groups)
        return groups

    def acknowledge(self, step: int) -> None:
        """Count the batches of all steps before `step` as consumed."""
        if self._selected.step < step:
            self._num_masked += self._selected.num_masked
            self._selected = _Selected(step=self.next_step)
            if self._spread:
                self._spread.acknowledge()

    def _mask(self, trajectory: Trajectory, step: int) -> Trajectory:
        masked, num_masked = mask_over_age(trajectory, step - self._max_staleness)
        self._selected.num_masked += num_masked
        return masked

    def stats(self) -> dict[str, float]:
        """Return sizes now, waits of the last batch and its trajectories by age, and tokens masked since the start."""
        return {
            "rollout/num_ready": float(len(self._slots.ready)),
            "rollout/num_outstanding": float(len(self._slots.started)),
            "rollout/num_masked_tokens": float(self._num_masked + self._selected.num_masked),
        } | self._last

    def in_flight(self) -> list[int]:
        """Return the positions of slots that are started and not finished, in stream order."""
        return self._slots.in_flight()

    def state_dict(self) -> dict[str, Any]:
        """Return the ready slots, a batch that is not acknowledged among them, those in flight, and the next step.
        What slots in flight have sampled so far belongs to the producer."""
        ready = [*self._selected.slots, *((self._slots.started[p], p, group) for p, group in self._slots.ready.items())]
        return {
            "next_step": self._selected.step,
            "masked_tokens": self._num_masked,
            "skipped": self._num_skipped,
            "ready": [(version, p, [_to_plain(t) for t in group]) for version, p, group in ready],
            "in_flight": [(self._slots.started[p], p) for p in self.in_flight()],
            "spread": self._spread.state_dict() if self._spread else None,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, keep_ready: bool = True) -> None:
        """Continue where `state` was taken: slots keep their age. Slots in flight continue; without `keep_ready` the
        ready ones are sampled again."""
        self.skip_to(state["next_step"])
        self._num_masked, self._num_skipped = state["masked_tokens"], state.get("skipped", 0)
        if self._spread:
            self._spread.load_state_dict(state["spread"])
        started = {position: version for version, position, *_ in [*state["ready"], *state["in_flight"]]}
        ready = state["ready"] if keep_ready else ()
        self._slots = PromptSlots(started, {position: [Trajectory(**t) for t in group] for _, position, group in ready})

    def skip_to(self, step: int) -> None:
        """Begin at `step`, with no slot started."""
        self.next_step = step
        self._selected = _Selected(step=step)
        self._num_skipped = 0
        if self._spread:
            self._spread.begin_at(self._schedule.consumed_before(step))

    def _num_steps(self) -> str:
        return "endless" if self._schedule.total_epochs == ENDLESS else str(self._schedule.total_steps)


def _to_plain(trajectory: Trajectory) -> dict[str, Any]:
    """Return the trajectory's fields; the arrays are shared, as trajectories are never changed in place."""
    return {field.name: getattr(trajectory, field.name) for field in fields(trajectory)}
