"""The staleness rule: how far ahead of the trainer episodes may be opened, and why no episode is ever late.

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
- Leasing a batch keeps it: rollout/experience/selection.py.
- Returning the lease of step i - 1, when its trainer has failed, keeps it: for d >= i the step i - 1 has room for the
  b_(i-1) episodes that come back, and of deadline i - 1 there are no others, as the oldest were leased.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout.experience.schedule import Schedule


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
