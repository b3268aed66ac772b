"""The train side of an experience store in the process that cuts batches: leases, samples as text, demonstrations."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import groupby
from typing import Any

from core.data.answers import Demonstrations
from core.data.rollout_batch import RolloutBatch, pack_trajectories
from core.monitoring.sample_file import SampleWriter
from core.monitoring.samples import Sample
from rollout.experience import Lessee
from rollout.types import Trajectory


class LeasedBatches:
    """The batches of a run. For step i: take(i), write_samples(), train, trained(i + 1)."""

    def __init__(self, lessee: Lessee, samples: SampleWriter, demonstrations: Demonstrations | None = None) -> None:
        self._lessee, self._samples, self._demonstrations = lessee, samples, demonstrations
        self._unwritten: tuple[list[list[Trajectory]], list[str], int] | None = None  # groups, ids and step

    async def take(self, step: int) -> RolloutBatch:
        """Return the batch of `step`, packed, when the samples of the last one are in their file. Raises as
        Lessee.take(), and OSError where samples could not be written."""
        await self._samples.written()
        assert self._unwritten is None, "write_samples() comes before the next take()"
        episodes = await self._lessee.take(step)
        groups, ids = [], []
        for id, members in groupby(episodes, key=lambda episode: episode.tags.group_id):
            ids.append(id)
            groups.append([trajectory for episode in members for trajectory in episode.trajectories])
        batch = await asyncio.to_thread(pack_trajectories, groups, ids)
        if self._demonstrations is not None:
            batch = replace(batch, demonstrations=self._demonstrations.of_step(step))
        self._unwritten = groups, ids, step + 1
        return batch

    async def write_samples(self) -> None:
        """Start writing the samples of the batch that was taken last. Call once after each take()."""
        assert self._unwritten is not None, "take() comes first"
        (groups, ids, step), self._unwritten = self._unwritten, None
        await self._samples.write(groups, ids, step=step)

    def trained(self, step: int) -> None:
        """Count all steps before `step` as trained."""
        self._lessee.trained(step)

    def end(self) -> None:
        """Acknowledge what was trained: the run is complete."""
        self._lessee.end()

    def stats(self) -> dict[str, float]:
        """Return waits and ages of the last batch."""
        return self._lessee.stats()

    async def notable(self) -> list[Sample]:
        """Return the best, worst and longest answer of the last batch that was written."""
        return await self._samples.notable()

    async def state_dict(self) -> dict[str, Any]:
        """Return what the store does not hold. The samples that write_samples() was called for are in their file
        then."""
        await self._samples.written()
        demonstrations = self._demonstrations.state_dict() if self._demonstrations is not None else None
        return {**self._lessee.state_dict(), "demonstrations": demonstrations}

    def load_state_dict(self, state: Any) -> None:
        """Continue where `state` was taken. Raises DatasetError where the demonstrations are others."""
        self._lessee.load_state_dict(state)
        before = state.get("demonstrations")
        if self._demonstrations is not None and before is not None:
            self._demonstrations.check_continues(before)
