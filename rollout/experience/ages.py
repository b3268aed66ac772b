"""The age of trajectories: the step that trains on them minus the version that sampled their oldest token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollout.experience.base import Group, StalenessInvariantError
from rollout.types import PROMPT_VERSION, Trajectory


def mask_over_age(trajectory: Trajectory, oldest_allowed: int) -> tuple[Trajectory, int]:
    """Mask the tokens that versions before `oldest_allowed` sampled; return the result and their number."""
    too_old = trajectory.loss_mask & (trajectory.versions < oldest_allowed)
    num_masked = int(too_old.sum())
    if not num_masked:
        return trajectory, 0
    return replace(trajectory, loss_mask=trajectory.loss_mask & ~too_old), num_masked


def age_metrics(groups: Sequence[Group], step: int, max_staleness: int) -> dict[str, float]:
    """Return the mean and the largest age of the trajectories of a batch. Raises StalenessInvariantError for one above
    `max_staleness`."""
    ages: list[int] = []
    for group in groups:
        for trajectory in group:
            oldest = trajectory.oldest_version
            if oldest == PROMPT_VERSION:
                continue
            if step - oldest > max_staleness:
                raise StalenessInvariantError(
                    f"step {step} got a trajectory of {trajectory.query_id} sampled from version {oldest}: "
                    f"its age is {step - oldest}, max_staleness is {max_staleness}"
                )
            ages.append(step - oldest)
    return {
        "staleness/mean": sum(ages) / max(len(ages), 1),
        "staleness/max": float(max(ages, default=0)),
    }
