"""The staleness rule: how far ahead of the trainer episodes may be opened, which ready episodes a step leases, and why
no episode is ever late.

Step i (from 0) trains at version i and leases b_i episodes. With max_staleness S, an episode opened at version v must
be leased by step v + S, its deadline; every token of it is sampled at v or later.

Rule: while i is the step of the next lease, an episode may be opened at version v only if fewer than
b_i + ... + b_(v+S) episodes are outstanding.

Invariant (Hall's condition): before the lease of step i, for every d >= i, the outstanding episodes of deadline <= d
are at most b_i + ... + b_d. Then the episodes due at i fit into the lease of step i, and as the oldest are leased first
no episode is ever late.
- Opening an episode at v keeps it, in whatever order and by whichever process episodes are opened: for d < v + S the
  episode does not count, and for d >= v + S all that are outstanding, this one included, are at most
  b_i + ... + b_(v+S). Opening an episode again, later, only moves its deadline back.
- Dropping or skipping an episode keeps it: there is one fewer.
- Leasing a batch keeps it: see OldestFirst.
- Returning the lease of step i - 1, when its trainer has failed, keeps it: for d >= i the step i - 1 has room for the
  b_(i-1) episodes that come back, and of deadline i - 1 there are no others, as the oldest were leased.

OldestFirst: step i leases the b_i oldest ready episodes, as soon as for every deadline d > i the episodes of deadline
<= d that stay behind fit into the leases of steps i+1..d. This keeps the invariant, because it is the condition that
the step waits for. The wait always ends: under the invariant the b_i outstanding episodes of earliest deadline satisfy
the condition once they are finished, and episodes in flight finish. No episode is dropped, and none overtakes an older
one for being short: a slow one is waited for, within its slack.
FirstFinished waits for no particular episode; the lessee masks tokens sampled before version i - S.
A step that has waited long enough leases what is ready (`partial`). The oldest episodes in flight are late then, as
many as the invariant needs.
InOrder: step i leases the b_i outstanding episodes that were opened first. By the rule of admission the j-th episode
that was opened and not dropped was opened at i - S or later, where i is the step that leases it, so the bound holds;
and every run has the same batches.

Dynamic sampling: finished episodes whose rewards are all equal are dropped, and other prompts take their place.

Every advantage of such a group is 0. Dropping an episode makes room for the next prompt of the stream, so that steps
keep their size and the staleness bound its proof. Nothing is dropped silently: each lease reports what was drawn since
the one before, by reason, beside what the step trains on. Source: Yu et al. 2025 (DAPO), section 3.2.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout.experience.base import Lease, Outstanding, Selection, StalenessError
from rollout.experience.episode import Tags

ENDLESS = 2**63 - 1
"""`total_epochs` of a schedule without an end."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """An epoch visits every prompt once, in ceil(num_prompts / batch_size) steps; its last batch may be smaller.

    Positions in the stream and steps count from 0, except in `position`."""

    num_prompts: int
    """Prompts of one epoch."""
    batch_size: int
    """Prompts of one step."""
    total_epochs: int = ENDLESS
    total_steps_limit: int | None = None
    """Ends the run before its epochs do."""

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_prompts // self.batch_size)

    @property
    def total_steps(self) -> int:
        steps = self.steps_per_epoch * self.total_epochs
        return steps if self.total_steps_limit is None else min(steps, self.total_steps_limit)

    @property
    def num_epochs(self) -> int:
        """Epochs that the run begins."""
        return -(-self.total_steps // self.steps_per_epoch)

    def steps_of_epoch(self, epoch: int) -> int:
        """Return how many steps of `epoch`, which counts from 1, the run has; fewer where it ends within."""
        return min(self.steps_per_epoch, self.total_steps - (epoch - 1) * self.steps_per_epoch)

    @property
    def total_prompts(self) -> int:
        return self.first_prompt_of(self.total_steps)

    def first_prompt_of(self, step: int) -> int:
        """Return the position at which `step` begins, also beyond the last step."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self.num_prompts + min(within * self.batch_size, self.num_prompts)

    def consumed_before(self, step: int) -> int:
        """Return how many prompts steps 0..step-1 consume together; nothing is consumed after the last step."""
        return self.first_prompt_of(min(step, self.total_steps))

    def batch_of(self, step: int) -> int:
        """Return how many prompts `step` consumes; 0 after the last step."""
        return self.consumed_before(step + 1) - self.consumed_before(step)

    def step_of(self, position: int) -> int:
        """Return the step to which the prompt at `position` nominally belongs: the number of whole steps before it."""
        epoch, within = divmod(position, self.num_prompts)
        return epoch * self.steps_per_epoch + within // self.batch_size

    def position(self, step: int) -> tuple[int, int]:
        """Return (epoch, step of the epoch) of global step `step`; all three count from 1."""
        epoch, epoch_step = divmod(step - 1, self.steps_per_epoch)
        return epoch + 1, epoch_step + 1


@dataclass(frozen=True)
class StalenessAdmission:
    """Admits the episodes of the next `max_staleness` steps beside those of the step that trains; ends with the run."""

    schedule: Schedule
    max_staleness: int
    """In steps, at least 0. 0: trainer and generators take turns."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness={self.max_staleness} must be 0 (synchronous) or more")

    def admits(self, num_outstanding: int, *, next_step: int, version: int) -> bool:
        """Return whether an episode may be sampled from weights of `version` on, while so many are outstanding and the
        next lease is that of `next_step`."""
        due = self.schedule.consumed_before(version + self.max_staleness + 1)
        return num_outstanding < due - self.schedule.consumed_before(next_step)


class EveryEpisode:
    """Admits every episode: of what is copied into a store, and of measurements."""

    def admits(self, num_outstanding: int, *, next_step: int, version: int) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True)
class _OfSchedule:
    schedule: Schedule
    max_staleness: int

    def batch_of(self, step: int) -> int:
        return self.schedule.batch_of(step)

    def partial(self, outstanding: Outstanding, step: int) -> tuple[list[str], list[str]]:
        """Return the ready episodes of a batch, and as many of the oldest ones in flight as must go for the invariant:
        for every deadline d > i, those of deadline <= d that stay behind fit into the leases of steps i+1..d."""
        ids = outstanding.oldest_ready(self.schedule.batch_of(step))
        if not ids:
            return [], []
        to_lease, due, num_late = len(ids), 0, 0
        for version in sorted(outstanding.by_version):
            leased = min(to_lease, outstanding.ready_by_version.get(version, 0))
            to_lease -= leased
            due += outstanding.by_version[version] - leased
            end = version + self.max_staleness + 1
            room = self.schedule.consumed_before(end) - self.schedule.consumed_before(step + 1)
            num_late = max(num_late, due - max(room, 0))
        return ids, outstanding.oldest_open(num_late)


class OldestFirst(_OfSchedule):
    """Leases the oldest episodes, and waits for a slow one only if it could become late otherwise."""

    def is_ready(self, outstanding: Outstanding, step: int) -> bool:
        """Return whether the episodes that stay behind fit into the steps before their deadlines."""
        size = self.schedule.batch_of(step)
        by_version, ready_by_version = outstanding.by_version, outstanding.ready_by_version
        due = finished = 0
        for version in sorted(by_version):
            deadline = version + self.max_staleness
            due += by_version[version]
            finished += ready_by_version.get(version, 0)
            later_steps = self.schedule.consumed_before(deadline + 1) - self.schedule.consumed_before(step + 1)
            if due - size > later_steps:
                raise StalenessError(
                    f"step {step}: {due} episodes must be trained by step {deadline}, "
                    f"which has room for {size + later_steps}"
                )
            if due - min(finished, size) > later_steps:
                return False
        return True

    def choose(self, outstanding: Outstanding, step: int) -> list[str]:
        return outstanding.oldest_ready(self.schedule.batch_of(step))


class FirstFinished(_OfSchedule):
    """Leases a batch as soon as enough episodes are ready, the oldest of them first."""

    def is_ready(self, outstanding: Outstanding, step: int) -> bool:
        return sum(outstanding.ready_by_version.values()) >= self.schedule.batch_of(step)

    def choose(self, outstanding: Outstanding, step: int) -> list[str]:
        return outstanding.oldest_ready(self.schedule.batch_of(step))

    def partial(self, outstanding: Outstanding, step: int) -> tuple[list[str], list[str]]:
        """Return what is ready of the batch; nothing is late, as old tokens are masked."""
        return outstanding.oldest_ready(self.schedule.batch_of(step)), []


class InOrder(_OfSchedule):
    """Leases episodes as they were opened, whichever finished first."""

    def is_ready(self, outstanding: Outstanding, step: int) -> bool:
        size = self.schedule.batch_of(step)
        first = outstanding.first_opened(size)
        return len(first) == size and all(ready for _, ready in first)

    def partial(self, outstanding: Outstanding, step: int) -> tuple[list[str], list[str]]:
        """Return what is ready of the batch, and the rest of it."""
        first = outstanding.first_opened(self.schedule.batch_of(step))
        ready = [id for id, is_ready in first if is_ready]
        return ready, [id for id, is_ready in first if not is_ready] if ready else []

    def choose(self, outstanding: Outstanding, step: int) -> list[str]:
        return [id for id, _ in outstanding.first_opened(self.schedule.batch_of(step))]


SELECTIONS: dict[str, Callable[[Schedule, int], Selection]] = {
    "oldest_first": OldestFirst,
    "first_finished": FirstFinished,
    "in_order": InOrder,
}
"""By name: called with the schedule and max_staleness."""


logger = logging.getLogger(__name__)

REASONS = ("all_right", "all_wrong")
"""Why a group has no spread: every reward is the same, above 0 or not."""


def no_spread(tags: Tags) -> str | None:
    """Return the reason in REASONS for which an episode has no spread; None where its rewards differ."""
    rewards = set(tags.rewards)
    if len(rewards) > 1:
        return None
    return "all_right" if rewards.pop() > 0 else "all_wrong"


@dataclass(frozen=True)
class SpreadFilter:
    """Drops episodes without spread, among the first `limit` batches that are opened behind the last one leased, and
    one more for each step of staleness. Beyond them, episodes are kept as they are: a task that is solved, or hopeless,
    does not stop the run."""

    schedule: Schedule
    max_staleness: int
    limit: int

    def drops(self, tags: Tags, ahead: int) -> bool:
        """Return whether a finished episode is dropped: `ahead` episodes were opened between the last one that was
        leased and this one."""
        return no_spread(tags) is not None and ahead < self._reach

    @property
    def _reach(self) -> int:
        return (self.limit + self.max_staleness) * self.schedule.batch_size

    def metrics(self, lease: Lease) -> dict[str, float]:
        """Return what was drawn since the lease before, by reason, and what of it the step trains on. Warns where
        episodes without spread were kept."""
        dropped = [tags for tags in lease.dropped if tags.fate == "dropped" and not tags.reason]
        reasons = [no_spread(tags) for tags in dropped]
        kept = sum(no_spread(tags) is not None for tags in lease.tags)
        if kept:
            logger.warning(
                "Dynamic sampling: %d groups without spread are kept, as %d prompts were drawn for the step. Raise "
                "algorithm.dynamic_sampling_limit, or use harder or easier prompts.", kept, self._reach,
            )  # fmt: skip
        drawn = [*dropped, *lease.tags]
        metrics = {f"dropped_{reason}": float(reasons.count(reason)) for reason in REASONS}
        metrics |= {"drawn_prompts": float(len(drawn)), "kept_without_spread": float(kept)}
        for name, of in (("drawn", drawn), ("trained", lease.tags)):
            metrics[f"{name}_length"] = _mean([n for tags in of for n in tags.lengths])
            metrics[f"{name}_reward"] = _mean([reward for tags in of for reward in tags.rewards])
        return {f"dynamic_sampling/{name}": value for name, value in metrics.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
