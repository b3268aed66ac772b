"""The age of trajectories: the step that trains on them minus the version that sampled their oldest token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rollout.experience.base import Group, StalenessInvariantError
from rollout.types import PROMPT_VERSION, Trajectory

MAX_REPORTED_AGE = 16
"""Ages above share one metric: with max_staleness=1000 a row would have 1,001 of them."""


def mask_over_age(trajectory: Trajectory, oldest_allowed: int) -> tuple[Trajectory, int]:
    """Mask the tokens that versions before `oldest_allowed` sampled; return the result and their number."""
    too_old = trajectory.loss_mask & (trajectory.versions < oldest_allowed)
    num_masked = int(too_old.sum())
    if not num_masked:
        return trajectory, 0
    return replace(trajectory, loss_mask=trajectory.loss_mask & ~too_old), num_masked


def age_metrics(groups: Sequence[Group], step: int, max_staleness: int) -> dict[str, float]:
    """Count the trajectories of a batch by age. Raises StalenessInvariantError for one above `max_staleness`."""
    ages: Counter[int] = Counter()
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
            ages[step - oldest] += 1
    metrics = {
        "staleness/mean": sum(age * count for age, count in ages.items()) / max(ages.total(), 1),
        "staleness/max": float(max(ages, default=0)),
    }
    for age in range(min(max_staleness, MAX_REPORTED_AGE) + 1):
        metrics[f"staleness/age_{age}"] = float(ages[age])
    if max_staleness > MAX_REPORTED_AGE:
        above = sum(count for age, count in ages.items() if age > MAX_REPORTED_AGE)
        metrics[f"staleness/age_above_{MAX_REPORTED_AGE}"] = float(above)
    return metrics
