"""A reward that costs nothing, so that a measurement of the rollout side is not one of math-verify."""

from __future__ import annotations

from rollout.types import Prompt


def no_reward(prompt: Prompt, text: str) -> float:
    """0 whatever the answer."""
    return 0.0
