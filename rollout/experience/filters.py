"""Dynamic sampling: finished groups whose rewards are all equal are dropped, and other prompts take their place.

Every advantage of such a group is 0. Dropping a slot makes room for the next prompt of the stream (`num_dropped` moves
what admission counts), so that steps keep their size and the staleness bound its proof. Nothing is dropped silently:
each selection reports what was drawn since the one before, by reason, beside what the step trains on.
Source: Yu et al. 2025 (DAPO), section 3.2.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rollout.experience.base import Group
from rollout.experience.schedule import Schedule

logger = logging.getLogger(__name__)

REASONS = ("all_right", "all_wrong")
"""Why a group has no spread: every reward is the same, above 0 or not."""


def no_spread(group: Group) -> str | None:
    """Return the reason in REASONS for which a group has no spread; None where its rewards differ."""
    rewards = {trajectory.reward for trajectory in group}
    if len(rewards) > 1:
        return None
    return "all_right" if rewards.pop() > 0 else "all_wrong"


@dataclass
class _Tally:
    """What groups have in common: their number by reason, and sums over their trajectories."""

    reasons: dict[str, int] = field(default_factory=dict)
    num_trajectories: int = 0
    num_tokens: int = 0
    reward: float = 0.0

    def add(self, group: Group, reason: str) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.num_trajectories += len(group)
        self.num_tokens += sum(int((t.versions >= 0).sum()) for t in group)
        self.reward += sum(t.reward for t in group)

    def __add__(self, other: _Tally) -> _Tally:
        return _Tally(
            dict(Counter(self.reasons) + Counter(other.reasons)),
            self.num_trajectories + other.num_trajectories,
            self.num_tokens + other.num_tokens,
            self.reward + other.reward,
        )


class SpreadFilter:
    """Drops groups without spread, among the first `limit` batches of prompts behind the last one that was trained, and
    one more for each step of staleness. Beyond them, groups are kept as they are: a task that is solved, or hopeless,
    does not stop the run."""

    def __init__(self, schedule: Schedule, *, max_staleness: int, limit: int) -> None:
        self._reach = (limit + max_staleness) * schedule.batch_size
        self.num_dropped = 0
        """Slots dropped since the beginning of the stream."""
        self._since = _Tally()  # since the last selection
        self._kept = 0  # without spread, beyond the limit
        self._first = 0  # position behind the last prompt that was trained
        self._unacknowledged: tuple[_Tally, int, int] | None = None  # the last selection's: what it reported

    def drops(self, position: int, group: Group) -> bool:
        """Return whether the finished group of a slot is dropped; count it if so."""
        reason = no_spread(group)
        if reason is None:
            return False
        if position >= self._first + self._reach:
            if not self._kept:
                logger.warning(
                    "Dynamic sampling: the %d prompts from %d on are drawn; groups without spread are kept. Raise "
                    "algorithm.dynamic_sampling_limit, or use harder or easier prompts.", self._reach, self._first,
                )  # fmt: skip
            self._kept += 1
            return False
        self.num_dropped += 1
        self._since.add(group, reason)
        return True

    def select(self, positions: Sequence[int], groups: Sequence[Group]) -> dict[str, float]:
        """Close the account of a step that trains on these groups; return its metrics."""
        trained = _Tally()
        for group in groups:
            trained.add(group, "trained")
        drawn, kept = self._since + trained, self._kept
        self._unacknowledged = self._since, kept, self._first
        self._since, self._kept, self._first = _Tally(), 0, max(self._first, max(positions) + 1)
        metrics = {f"dropped_{reason}": float(drawn.reasons.get(reason, 0)) for reason in REASONS}
        metrics |= {"drawn_prompts": float(sum(drawn.reasons.values())), "kept_without_spread": float(kept)}
        for name, tally in (("drawn", drawn), ("trained", trained)):
            metrics[f"{name}_length"] = tally.num_tokens / tally.num_trajectories
            metrics[f"{name}_reward"] = tally.reward / tally.num_trajectories
        return {f"dynamic_sampling/{name}": value for name, value in metrics.items()}

    def acknowledge(self) -> None:
        """Count the last selection as trained."""
        self._unacknowledged = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything since the last selection that was acknowledged."""
        since, kept, first = self._unacknowledged or (_Tally(), 0, self._first)
        return {
            "num_dropped": self.num_dropped,
            "since": asdict(since + self._since),
            "kept": kept + self._kept,
            "first": first,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.num_dropped, self._since = state["num_dropped"], _Tally(**state["since"])
        self._kept, self._first, self._unacknowledged = state["kept"], state["first"], None

    def begin_at(self, position: int) -> None:
        """Begin at `position` of the stream, with nothing drawn."""
        self.num_dropped, self._since, self._kept = 0, _Tally(), 0
        self._first, self._unacknowledged = position, None
