"""The rules of an experience, put together from the settings of a run."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.experience.base import Admission, OverAge, Selection
from rollout.experience.replay import Replay
from rollout.experience.schedule import ENDLESS, Schedule
from rollout.experience.selection import SELECTIONS, SpreadFilter, StalenessAdmission


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Which episodes may begin, which a step leases, and how old they may be."""

    schedule: Schedule
    admission: Admission
    selection: Selection
    spread: SpreadFilter | None
    """Drops episodes. None: all are kept."""
    max_staleness: int
    over_age: OverAge
    in_order: bool
    replay: Replay | None = None
    """What steps replay beside their new episodes. None: nothing."""

    @property
    def settings(self) -> dict[str, object]:
        """What a recover checkpoint must have been written with, by the names of the configuration."""
        return {
            "batch_size": self.schedule.batch_size, "max_staleness": self.max_staleness, "over_age": self.over_age,
            "in_order": self.in_order, "dynamic_sampling": self.spread is not None,
        }  # fmt: skip


def make_rules(
    *,
    num_prompts: int,
    batch_size: int,
    max_staleness: int,
    over_age: OverAge = "wait",
    in_order: bool = False,
    dynamic_sampling_limit: int | None = None,
    steps_ahead: int | None = None,
    num_epochs: int | None = None,
    num_steps: int | None = None,
    replay: Replay | None = None,
) -> Rules:
    """Make the rules for a stream of `num_prompts` prompts an epoch, `batch_size` a step.

    `over_age`: "wait" selects oldest first; "mask" selects what is finished and masks tokens above the bound.
    `in_order`: a step trains on the prompts of its place in the stream. `dynamic_sampling_limit`: drop groups without
    spread, up to so many batches of prompts a step; None: keep all. `steps_ahead`: begin prompts of so many steps after
    the version that samples them; None: as many as `max_staleness` allows. `num_epochs`, `num_steps`: the stream ends
    at the first of the two; None: no end. Raises ValueError for a value that makes no sense."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    if over_age not in ("wait", "mask"):
        raise ValueError(f"over_age={over_age!r} must be 'wait' or 'mask'")
    schedule = Schedule(
        num_prompts=num_prompts,
        batch_size=batch_size,
        total_epochs=ENDLESS if num_epochs is None else num_epochs,
        total_steps_limit=num_steps,
    )
    spread = None
    if dynamic_sampling_limit is not None:
        spread = SpreadFilter(schedule, max_staleness, dynamic_sampling_limit)
    selection = "in_order" if in_order else "first_finished" if over_age == "mask" else "oldest_first"
    return Rules(
        schedule=schedule,
        admission=StalenessAdmission(schedule, max_staleness if steps_ahead is None else steps_ahead),
        selection=SELECTIONS[selection](schedule, max_staleness),
        spread=spread,
        max_staleness=max_staleness,
        over_age=over_age,
        in_order=in_order,
        replay=replay,
    )
