"""The outstanding prompt slots, counted by the version at which they were started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rollout.types import Trajectory


class PromptSlots:
    """Every outstanding slot. Invariant: `outstanding` and `finished` count `started` and `ready` by version."""

    def __init__(
        self, started: Mapping[int, int] | None = None, ready: Mapping[int, list[Trajectory]] | None = None
    ) -> None:
        self.started: dict[int, int] = dict(started or {})
        """Position -> version at the slot's start."""
        self.ready: dict[int, list[Trajectory]] = dict(ready or {})
        """Position -> the slot's finished group."""
        self.outstanding: Counter[int] = Counter(self.started.values())
        """Version at the start -> number of slots."""
        self.finished: Counter[int] = Counter(self.started[position] for position in self.ready)
        """The same for ready slots."""

    def start(self, position: int, version: int) -> None:
        """Open a slot, or move the start of one that is in flight to `version`."""
        if position in self.started:
            _decrease(self.outstanding, self.started[position])
        self.started[position] = version
        self.outstanding[version] += 1

    def finish(self, position: int, group: list[Trajectory]) -> None:
        """Make a slot ready."""
        self.ready[position] = group
        self.finished[self.started[position]] += 1

    def drop(self, position: int) -> None:
        """Close a slot that is in flight."""
        _decrease(self.outstanding, self.started.pop(position))

    def remove(self, position: int) -> tuple[int, list[Trajectory]]:
        """Close a ready slot; return the version at its start and its group."""
        version = self.started.pop(position)
        _decrease(self.finished, version)
        _decrease(self.outstanding, version)
        return version, self.ready.pop(position)

    def in_flight(self) -> list[int]:
        """Return the positions of slots that are not ready, in stream order."""
        return sorted(self.started.keys() - self.ready.keys())


def _decrease(counter: Counter[int], key: int) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
