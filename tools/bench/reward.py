"""A reward that costs nothing, so that a measurement of the rollout side is not one of math-verify."""

from __future__ import annotations

from rollout.types import Prompt


def coin_reward(prompt: Prompt, text: str) -> float:
    """Return 0 or 1 by the answer's characters: groups with both, so that no gradient is zero."""
    return float(sum(map(ord, text)) % 2)


def exact_reward(prompt: Prompt, text: str) -> float:
    """Return 1 where the text is a solution without its box, and -1 else."""
    return 1.0 if f"\\boxed{{{text.strip()}}}" in prompt.solutions else -1.0
