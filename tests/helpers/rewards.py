"""Reward functions for tests, in a module that worker processes import fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollout.types import Prompt

if TYPE_CHECKING:
    from rollout.data.task_sets import Candidate


def zero(prompt: Prompt, text: str) -> float:
    return 0.0


def even(prompt: Prompt, text: str) -> float:
    """Return 1.0 for half of what a model of random weights answers."""
    return float(len(text.strip()) % 2 == 0)


def length(prompt: Prompt, text: str) -> float:
    """Return the number of characters."""
    return float(len(text))


def rarest_first(candidates: Sequence[Candidate]) -> list[float]:
    """Score rows for a curriculum: those of few episodes and high rewards come first."""
    return [(c.success or 0.0) - 100.0 * c.num_episodes for c in candidates]
