"""The learning rate as a function of the optimizer's step counter; the counter is all the state there is."""

from __future__ import annotations

import math
from collections.abc import Callable

DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""By lr_scheduler_type: share of (lr - min_lr) left at `progress` in [0, 1] through the decay."""


def learning_rate(
    step: int,
    *,
    lr: float,
    min_lr_ratio: float,
    lr_scheduler_type: str,
    warmup_steps_proportion: float,
    total_steps: int,
) -> float:
    """Return the learning rate of update number `step` (the first is 0).

    Rises linearly over the first warmup_steps_proportion * total_steps updates, the first of which is not zero, then
    decays to min_lr_ratio * lr at update total_steps and stays there. Raises ValueError on an unknown type.
    """
    if lr_scheduler_type not in DECAYS:
        raise ValueError(f"lr_scheduler_type={lr_scheduler_type!r} is unknown; use one of {', '.join(DECAYS)}")
    warmup_steps = round(warmup_steps_proportion * total_steps)
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    min_lr = lr * min_lr_ratio
    return min_lr + (lr - min_lr) * DECAYS[lr_scheduler_type](progress)
