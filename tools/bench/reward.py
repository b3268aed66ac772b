"""A reward that costs nothing, so that a measurement of the rollout side is not one of math-verify."""

from __future__ import annotations

from rollout.types import Prompt


def coin_reward(prompt: Prompt, text: str) -> float:
    """Return 0 or 1 by the answer's characters: groups with both, so that no gradient is zero."""
    return float(sum(map(ord, text)) % 2)
