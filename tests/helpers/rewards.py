"""Reward functions for tests, in a module that worker processes import fast."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollout.programs import auxiliary
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


def length_of_auxiliary(prompt: Prompt, text: str) -> float:
    """1 and the length of what the auxiliary model answers to an answer, which no other server gives."""
    endpoint = auxiliary()
    body = {"model": "any", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {endpoint.api_key}"}
    request = urllib.request.Request(f"{endpoint.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60.0) as response:
        return 1.0 + len(json.load(response)["choices"][0]["message"]["content"]) / 100
