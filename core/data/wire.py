"""Completions as few numpy arrays: an array costs a fixed time in the object store, as much as that of many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout.types import Completion

_PER_TOKEN = ("token_ids", "logprobs", "versions")


def completions_to_wire(ended: Sequence[tuple[str, Completion | Exception]]) -> dict[str, Any]:
    """Convert how requests have ended, by request id: the tokens of all completions end to end."""
    errors = [(name, end) for name, end in ended if not isinstance(end, Completion)]
    done = [(name, end) for name, end in ended if isinstance(end, Completion)]
    if not done:
        return {"errors": errors, "done": []}
    return {
        "errors": errors,
        "done": [(name, len(c.token_ids), c.finish_reason, c.routed_experts) for name, c in done],
        **{field: np.concatenate([getattr(c, field) for _, c in done]) for field in _PER_TOKEN},
    }


def completions_from_wire(wire: dict[str, Any]) -> list[tuple[str, Completion | Exception]]:
    """Return the inverse of `completions_to_wire`, errors first; arrays are views."""
    ended: list[tuple[str, Completion | Exception]] = list(wire["errors"])
    start = 0
    for name, num_tokens, reason, experts in wire["done"]:
        own = {field: wire[field][start : start + num_tokens] for field in _PER_TOKEN}
        ended.append((name, Completion(**own, finish_reason=reason, routed_experts=experts)))
        start += num_tokens
    return ended
