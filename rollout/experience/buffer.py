"""Finished groups on their way to the trainer, and the rule that keeps them fresh.

Step i (from 0) trains at version i and consumes b_i prompts. Prompts are started in stream order as *tickets*; prompt k
nominally belongs to the step s(k) that would consume it if everything were consumed in order. With max_staleness S a
ticket started at version v must be consumed by step v + S, its deadline; every token of it is sampled at v or later.

Admission: prompt k is started at version v only if s(k) <= v + S.
Take: step i gets the b_i oldest finished tickets, as soon as for every deadline d > i the tickets of deadline <= d that
stay behind fit into the steps i+1..d.

Invariant (Hall's condition): before step i, for every d >= i, the outstanding tickets of deadline <= d are at most
b_i + ... + b_d. Then the tickets due at i fit into step i, and as the oldest are taken first no ticket is ever late.
- Starting a ticket at v keeps it. Its deadline v + S is the latest of all, so only d >= v + S is to be shown: all
  tickets ever started have s(k) <= v + S, so there are at most b_0 + ... + b_(v+S) of them, of which
  b_0 + ... + b_(i-1) are consumed. Starting a ticket again, later, only moves its deadline back.
- A take keeps it: that is the condition it waits for. It never waits for ever: under the invariant the b_i outstanding
  tickets of earliest deadline satisfy the condition once they are finished, and running ones finish.
Nothing is dropped and nothing jumps the queue for being short: a slow prompt is waited for, within its slack.
over_age="mask" waits for no particular ticket: tokens sampled before version i - S are masked out in take(i).
in_order: step i gets exactly the prompts that nominally belong to it, whoever finished first. Its tickets were started
at i - S or later, by the rule of admission, so the bound holds; and every run has the same batches.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from rollout.types import PROMPT_VERSION, Trajectory

OverAge = Literal["wait", "mask"]
Group = list[Trajectory]


class StalenessInvariantError(AssertionError):
    """The staleness bound does not hold, which the module's docstring says cannot happen."""


@dataclass(frozen=True, kw_only=True)
class StepSchedule:
    """How the stream of prompts is cut into steps: an epoch has ceil(num_prompts / batch_size), the last smaller."""

    num_prompts: int
    """Prompts of one epoch."""
    batch_size: int
    """Prompts of one step."""
    num_epochs: int | None = None
    """None: no end."""
    num_steps: int | None = None
    """Where the run ends before its epochs do."""

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_prompts // self.batch_size)

    @property
    def total_prompts(self) -> int | None:
        limits = [] if self.num_epochs is None else [self.num_epochs * self.num_prompts]
        limits += [] if self.num_steps is None else [self._before(self.num_steps)]
        return min(limits, default=None)

    def consumed_before(self, step: int) -> int:
        """Prompts that steps 0..step-1 consume together."""
        consumed, total = self._before(step), self.total_prompts
        return consumed if total is None else min(consumed, total)

    def _before(self, step: int) -> int:
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self.num_prompts + min(within * self.batch_size, self.num_prompts)

    def batch_of(self, step: int) -> int:
        """Prompts that `step` consumes; 0 after the last step."""
        return self.consumed_before(step + 1) - self.consumed_before(step)

    def step_of(self, position: int) -> int:
        """The step to which the prompt at `position` of the stream nominally belongs."""
        epoch, within = divmod(position, self.num_prompts)
        return epoch * self.steps_per_epoch + within // self.batch_size


class StalenessBuffer:
    """Tickets from start to consumption. One Condition: put(), restart() and fail() wake the one take() that waits."""

    def __init__(
        self, schedule: StepSchedule, *, max_staleness: int, over_age: OverAge = "wait", in_order: bool = False
    ) -> None:
        if max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness} must be 0 (synchronous) or more")
        if over_age not in ("wait", "mask"):
            raise ValueError(f"over_age={over_age!r} must be 'wait' or 'mask'")
        self.schedule = schedule
        self.max_staleness = max_staleness
        self.over_age = over_age
        self.in_order = in_order
        self.next_step = 0
        self.taken: list[int] = []
        """Positions in the stream of the prompts of the last take(), in its order."""
        self._started: dict[int, int] = {}  # position -> version at its start; every outstanding ticket
        self._outstanding: Counter[int] = Counter()  # version at the start -> tickets
        self._finished: Counter[int] = Counter()  # the same, of those in _ready
        self._ready: dict[int, Group] = {}  # position -> its finished group
        self._changed = asyncio.Condition()
        self._error: BaseException | None = None
        self._masked_tokens = 0
        self._last: dict[str, float] = {}

    def may_start(self, position: int, version: int) -> bool:
        """The rule of admission, and the end of the last step."""
        total = self.schedule.total_prompts
        return (total is None or position < total) and self.schedule.step_of(position) <= version + self.max_staleness

    def start(self, position: int, version: int) -> None:
        """The ticket of `position` is sampled from weights of `version` on."""
        self._started[position] = version
        self._outstanding[version] += 1

    async def restart(self, position: int, version: int) -> None:
        """The ticket of `position` failed and is sampled once more, which may be all that take() waits for."""
        async with self._changed:
            _decrease(self._outstanding, self._started[position])
            self.start(position, version)
            self._changed.notify_all()

    async def put(self, position: int, group: Group) -> None:
        """The ticket of `position` is finished."""
        version = self._started[position]
        async with self._changed:
            self._ready[position] = group
            self._finished[version] += 1
            self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """Let the running and every later take() raise `error`."""
        async with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    async def take(self, step: int) -> list[Group]:
        """The groups that `step` trains on, oldest first; waits for them. `step` counts up by one from call to call.

        Raises the error of fail(), ValueError on another step than the next, StalenessInvariantError.
        """
        size = self.schedule.batch_of(step)
        if step != self.next_step or not size:
            raise ValueError(f"take({step}): the next step is {self.next_step} of {self._num_steps()} in all")
        began = time.perf_counter()
        async with self._changed:
            await self._changed.wait_for(lambda: self._error is not None or len(self._ready) >= size)
            enough = time.perf_counter()
            await self._changed.wait_for(lambda: self._error is not None or self._is_due(step, size))
            if self._error is not None:
                raise self._error
            self.taken = sorted(self._ready, key=self._turn)[:size]
            groups = [self._pop(position) for position in self.taken]
            self.next_step += 1
        now = time.perf_counter()
        self._last = {"rollout/wait_seconds": now - began, "rollout/wait_for_oldest_seconds": now - enough}
        if self.over_age == "mask":
            groups = [[self._mask(trajectory, step) for trajectory in group] for group in groups]
        self._record_ages(groups, step)
        return groups

    def _is_due(self, step: int, size: int) -> bool:
        """Does what the oldest `size` finished tickets leave behind fit into the steps before its deadlines?"""
        if self.in_order:
            first = self.schedule.consumed_before(step)
            return all(position in self._ready for position in range(first, first + size))
        if self.over_age == "mask":
            return True
        outstanding = finished = 0
        for version in sorted(self._outstanding):
            deadline = version + self.max_staleness
            outstanding += self._outstanding[version]
            finished += self._finished[version]
            later_steps = self.schedule.consumed_before(deadline + 1) - self.schedule.consumed_before(step + 1)
            if outstanding - size > later_steps:
                raise StalenessInvariantError(
                    f"step {step}: {outstanding} prompts must be trained by step {deadline}, "
                    f"which has room for {size + later_steps}"
                )
            if outstanding - min(finished, size) > later_steps:
                return False
        return True

    def _turn(self, position: int) -> tuple[int, int]:
        """What finished tickets are sorted by: the oldest first, or in order."""
        return (0 if self.in_order else self._started[position]), position

    def _pop(self, position: int) -> Group:
        version = self._started.pop(position)
        _decrease(self._finished, version)
        _decrease(self._outstanding, version)
        return self._ready.pop(position)

    def _mask(self, trajectory: Trajectory, step: int) -> Trajectory:
        """`trajectory` without the tokens that are too old for `step`."""
        too_old = trajectory.loss_mask & (trajectory.versions < step - self.max_staleness)
        num_masked = int(too_old.sum())
        if not num_masked:
            return trajectory
        self._masked_tokens += num_masked
        return replace(trajectory, loss_mask=trajectory.loss_mask & ~too_old)

    def _record_ages(self, groups: list[Group], step: int) -> None:
        """Check the bound on what the tokens themselves say, and count trajectories by age."""
        ages: Counter[int] = Counter()
        for group in groups:
            for trajectory in group:
                oldest = trajectory.oldest_version
                if oldest == PROMPT_VERSION:
                    continue
                if step - oldest > self.max_staleness:
                    raise StalenessInvariantError(
                        f"step {step} got a trajectory of {trajectory.query_id} sampled from version {oldest}: "
                        f"its age is {step - oldest}, max_staleness is {self.max_staleness}"
                    )
                ages[step - oldest] += 1
        counted = max(ages.total(), 1)
        self._last["staleness/mean"] = sum(age * count for age, count in ages.items()) / counted
        self._last["staleness/max"] = float(max(ages, default=0))
        for age in range(self.max_staleness + 1):
            self._last[f"staleness/age_{age}"] = float(ages[age])

    def stats(self) -> dict[str, float]:
        """Sizes now; waits of the last batch and its trajectories by age; tokens masked since the start."""
        sizes = {"rollout/num_ready": float(len(self._ready)), "rollout/num_outstanding": float(len(self._started))}
        return sizes | {"rollout/num_masked_tokens": float(self._masked_tokens)} | self._last

    def in_flight(self) -> list[int]:
        """Positions of tickets that are started and not finished, in stream order."""
        return sorted(self._started.keys() - self._ready.keys())

    def state_dict(self) -> dict[str, Any]:
        """The finished tickets, those in flight and the next step. What those in flight have is the producer's."""
        ready = [(self._started[p], p, [_to_plain(t) for t in group]) for p, group in self._ready.items()]
        in_flight = [(self._started[p], p) for p in self.in_flight()]
        return {
            "next_step": self.next_step, "masked_tokens": self._masked_tokens, "ready": ready, "in_flight": in_flight
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any], *, keep_ready: bool = True) -> None:
        """Go on where `state` was taken: tickets keep their age; those in flight are running, and without `keep_ready`
        the finished ones run again."""
        self.next_step = state["next_step"]
        self._masked_tokens = state["masked_tokens"]
        ready = state["ready"] if keep_ready else ()
        self._ready = {position: [Trajectory(**t) for t in group] for _, position, group in ready}
        self._started = {position: version for version, position, *_ in [*state["ready"], *state["in_flight"]]}
        self._outstanding = Counter(self._started.values())
        self._finished = Counter(self._started[position] for position in self._ready)

    def skip_to(self, step: int) -> None:
        """Begin at `step`, with nothing started."""
        self.next_step = step

    def _num_steps(self) -> str:
        total = self.schedule.total_prompts
        return "endless" if total is None else str(self.schedule.step_of(total - 1) + 1)


def _decrease(counter: Counter[int], key: int) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


def _to_plain(trajectory: Trajectory) -> dict[str, Any]:
    """Its fields, the arrays shared: trajectories are never changed in place."""
    return {field.name: getattr(trajectory, field.name) for field in fields(trajectory)}
