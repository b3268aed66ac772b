"""Completions as few numpy arrays: an array costs a fixed time in the object store, as much as that of many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.experience.serial import records_from_plain, records_to_plain
from rollout.types import Completion


def completions_to_wire(ended: Sequence[tuple[str, Completion | Exception]]) -> dict[str, Any]:
    """Convert how requests have ended, by request id."""
    done = [(name, end) for name, end in ended if isinstance(end, Completion)]
    return {
        "errors": [(name, end) for name, end in ended if not isinstance(end, Completion)],
        "names": [name for name, _ in done],
        "done": records_to_plain([end for _, end in done]),
    }


def completions_from_wire(wire: dict[str, Any]) -> list[tuple[str, Completion | Exception]]:
    """Return the inverse of `completions_to_wire`, errors first; arrays are views."""
    return [*wire["errors"], *zip(wire["names"], records_from_plain(Completion, wire["done"]), strict=True)]
