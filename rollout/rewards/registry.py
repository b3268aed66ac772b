"""The reward functions that come with Slipstream, by the name that `reward.function` uses."""

from __future__ import annotations

from collections.abc import Callable

from rollout.rewards.math import math_reward, quick_math_reward
from rollout.types import Prompt, Reward

REWARDS: dict[str, Reward] = {"math": math_reward}

QUICK_REWARDS: dict[str, Callable[[Prompt, str], float | None]] = {"math": quick_math_reward}
"""Scores that are safe and fast enough to compute in the pool's own process; None: send the answer to a worker."""
