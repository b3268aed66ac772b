"""Dynamic sampling: finished episodes whose rewards are all equal are dropped, and other prompts take their place.

Every advantage of such a group is 0. Dropping an episode makes room for the next prompt of the stream, so that steps
keep their size and the staleness bound its proof. Nothing is dropped silently: each lease reports what was drawn since
the one before, by reason, beside what the step trains on. Source: Yu et al. 2025 (DAPO), section 3.2.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.experience.base import Lease
from rollout.experience.episode import Tags
from rollout.experience.schedule import Schedule

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
