"""What the rollout process of a train job runs: it leases and cuts batches, and samples nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.config.runtime import ExperienceConfig
from core.data.rollout_batch import RolloutBatch, pack_trajectories
from core.data.stored_batch import Arrays, Ref, StoredBatch, StoredFields
from core.explore.data import DataFacts, RunData
from core.monitoring.metrics import ROLLOUT, peak_gib
from core.monitoring.samples import Sample, SampleWriter
from core.processes.stacks import forget_modules
from core.train.step_batch import BatchFacts, BatchRequest, Results, Scored, Scoring, StepBatch
from rollout.data.source import DatasetError
from rollout.experience import Experience, Lessee, Patience, episode_id, open_store, without_epoch
from rollout.types import Trajectory

if TYPE_CHECKING:
    from core.config.experiments import PPOMATHConfig

logger = logging.getLogger(__name__)

Put = Callable[["Arrays"], "Ref"]
Fetch = Callable[[Sequence["Ref"]], list[Any]]


def open_experience(config: PPOMATHConfig) -> Experience:
    """Open the store of a run. Bench and serve jobs keep no episodes: as lessees of a shared store they would shut out
    the trainer."""
    if config.job in ("bench", "serve"):
        return open_store("memory")
    return open_store(config.experience.store, config.experience_path)


class BatchService:
    """Leases from a store that explore jobs fill. For step i: take(i), write_samples(), train, set_version(i + 1)."""

    def __init__(self, config: PPOMATHConfig, logs: Path, *, put: Put, fetch: Fetch) -> None:
        """`logs`: folder of the samples. `put`, `fetch`: place arrays where the ranks read them, and read what they
        have placed."""
        self._config, self._logs, self._put, self._fetch = config, logs, put, fetch
        self._batch: StepBatch | None = None
        self._version = 0

    async def start(self) -> DataFacts:
        """Read the data sets and open the store; return facts about the prompts."""
        config, data = self._config, RunData(self._config)
        self._data, self._rules = data, data.rules()
        self._experience = open_experience(config)
        lessee = config.run_name
        if config.job != "explore":
            self._experience.enroll(lessee)
        self._samples = SampleWriter(
            config.samples,
            self._logs,
            lambda tokens: str(data.tokenizer.decode(tokens)),
            {without_epoch(episode_id(prompt)): " or ".join(prompt.answers) for prompt in data.prompts.prompts},
        )
        self._lessee = Lessee(
            self._experience,
            self._rules,
            name=lessee,
            until_saved=config.experience.is_durable and config.recovers,
            keep_steps=config.experience.keep_steps,
            patience=_patience(config.experience),
            counts_late=config.ends_slow_prompts,
            right_at=config.right_rewards,
        )
        self._demonstrations = data.demonstrations()
        self._unwritten: tuple[list[list[Trajectory]], list[str], int] | None = None  # groups, ids and step
        forget_modules()
        return data.facts()

    async def begin(self, version: int, state: Any, ignore_changes: bool) -> None:
        """Begin at the step `version`, from the beginning or from a recover checkpoint's state. Raises ValueError where
        that does not fit the configuration, unless `ignore_changes`."""
        if state is not None:
            self._load(version, state, ignore_changes)
        self._samples.begin(version)
        await self.set_version(version)

    def _load(self, version: int, state: Any, ignore_changes: bool) -> None:
        batches = state["batches"]
        self._lessee.load_state_dict(batches)
        before = batches["demonstrations"]
        try:
            if self._demonstrations is not None and before is not None:
                self._demonstrations.check_continues(before)
        except DatasetError as change:
            if not ignore_changes:
                raise
            logger.warning("%s. Ignored: the run continues with these demonstrations.", change)

    async def take(
        self, request: BatchRequest, scoring: Scoring | None
    ) -> tuple[StoredBatch, StoredFields | None, tuple[BatchFacts, dict[str, float], Scored | None]]:
        """Return the next batch, and with `scoring` its advantages as score(), for the ranks; and what the driver
        reports of it: three results, of which the driver reads the third. Raises as lease()."""
        self._batch = None  # its memory is needed
        rollout, figures = await self.lease(request.version)
        batch = self._batch = await asyncio.to_thread(StepBatch, rollout, request, put=self._put)
        fields, scored = (None, None) if scoring is None else await asyncio.to_thread(batch.score, scoring, {})
        return batch.stored, fields, (batch.facts(), figures, scored)

    async def lease(self, version: int) -> tuple[RolloutBatch, dict[str, float]]:
        """Return the next batch, packed, and the figures of the lease, the workflow and the rewards, when the samples
        of the last one are in their file. Raises OSError where samples could not be written, and what ended the
        sampling."""
        await self._samples.written()
        assert self._unwritten is None, "write_samples() comes before the next take()"
        episodes = await self._lessee.take(version)
        groups, ids, is_new = [], [], []
        for id, of_group in groupby(episodes, key=lambda episode: episode.tags.group_id):
            members = [*of_group]
            ids.append(id)
            groups.append([trajectory for episode in members for trajectory in episode.trajectories])
            is_new.append(members[0].tags.uses == 1)
        batch = await asyncio.to_thread(pack_trajectories, groups, ids)
        if self._demonstrations is not None:
            batch = replace(batch, demonstrations=self._demonstrations.of_step(version))
        self._unwritten = [*compress(groups, is_new)], [*compress(ids, is_new)], version + 1
        figures = self._lessee.stats() | batch.workflow_figures() | {ROLLOUT: peak_gib()}
        return batch, self._figures(version) | figures | batch.reward_figures(self._config.reward.threshold)

    def _figures(self, version: int) -> dict[str, float]:
        status = self._experience.status()
        return {"rollout/num_ready": float(status.num_ready), "rollout/num_outstanding": float(status.num_outstanding)}

    async def score(self, scoring: Scoring, results: Mapping[str, Sequence[Ref]]) -> tuple[StoredFields, Scored]:
        """Compute the advantages of the batch; return what the updates train on, and what the driver reports: as
        take(). Start writing its samples."""
        assert self._batch is not None, "take() comes first"
        await self.write_samples()
        return await asyncio.to_thread(self._score, self._batch, scoring, results)

    def _score(
        self, batch: StepBatch, scoring: Scoring, results: Mapping[str, Sequence[Ref]]
    ) -> tuple[StoredFields, Scored]:
        fetched: Results = {name: self._fetch(placed) for name, placed in results.items()}
        return batch.score(scoring, fetched)

    async def write_samples(self) -> None:
        """Start writing the samples of the batch that was taken last. Call once after each take(), which runs before
        the evaluation of the previous step."""
        assert self._unwritten is not None, "take() comes first"
        (groups, ids, step), self._unwritten = self._unwritten, None
        await self._samples.write(groups, ids, step=step)

    async def set_version(self, version: int) -> None:
        """Count the steps before `version` as trained."""
        self._version = version
        self._lessee.trained(version)

    async def samples(self) -> list[Sample]:
        """Return the best, worst and longest answer of the last batch that was written."""
        return await self._samples.notable()

    async def state_dict(self) -> dict[str, object]:
        """Return the state that `begin` needs. The samples that write_samples() was called for are in their file then.
        Not to be called between take(i + 1) and set_version(i + 1)."""
        batches = await self._batches_state()
        stream = {"settings": dict(self._rules.settings), "dataset": self._data.prompts.state_dict()}
        return {"producer": stream | {"version": self._version}, "batches": batches}

    async def _batches_state(self) -> dict[str, object]:
        """Return what the store does not hold. The samples that write_samples() was called for are in their file
        then."""
        await self._samples.written()
        demonstrations = self._demonstrations.state_dict() if self._demonstrations is not None else None
        return {**self._lessee.state_dict(), "demonstrations": demonstrations}

    async def close(self) -> None:
        """Count what was trained as trained for good, end the writing of samples, and leave the store to another
        trainer."""
        self._lessee.end()
        await self._samples.close()
        self._experience.close()


def _patience(config: ExperienceConfig) -> Callable[[int], Patience] | None:
    """Return how long a step of so many prompts waits for the rest of them. None: without a limit."""
    given = config.over_rollout
    if config.max_read_timeout is None and not given.ratio:
        return None
    return partial(Patience, seconds=config.max_read_timeout, ratio=given.ratio, wait_seconds=given.wait_seconds)
