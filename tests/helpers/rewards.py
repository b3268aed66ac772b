"""Reward functions for tests, in a module that worker processes import fast."""

from __future__ import annotations

from rollout.types import Prompt


def zero(prompt: Prompt, text: str) -> float:
    return 0.0


def even(prompt: Prompt, text: str) -> float:
    """Return 1.0 for half of what a model of random weights answers."""
    return float(len(text.strip()) % 2 == 0)
