"""What the rollout process of a train job runs: it leases and cuts batches, and samples nothing."""

from __future__ import annotations

import logging
from typing import Any

from core.data.rollout_batch import RolloutBatch
from core.explore.data import RunData
from core.explore.settings import DataFacts, RolloutSettings
from core.monitoring.memory import ROLLOUT, peak_gib
from core.monitoring.sample_file import SampleWriter
from core.monitoring.samples import Sample
from core.train.leased_batches import LeasedBatches
from rollout.data.source import DatasetError
from rollout.experience import Experience, Lessee, Rules

logger = logging.getLogger(__name__)


class Batches:
    """The batches of a run. For step i: take(i), write_samples(), train, set_version(i + 1)."""

    def __init__(self, settings: RolloutSettings, data: RunData, experience: Experience, rules: Rules) -> None:
        self._tokenizer = data.tokenizer
        self.samples = SampleWriter(
            settings.samples,
            lambda tokens: str(self._tokenizer.decode(tokens)),
            {prompt.query_id: " or ".join(prompt.answers) for prompt in data.prompts.prompts},
        )
        self._right_at = settings.right_at
        lessee = Lessee(
            experience,
            rules,
            name=settings.lessee,
            until_saved=settings.acknowledges_saved,
            keep_steps=settings.keep_steps,
            right_at={name: one.right_at for name, one in settings.task_sets.items()},
        )
        self._leased = LeasedBatches(lessee, self.samples, data.demonstrations())

    def load_state_dict(self, state: Any, *, ignore_changes: bool) -> None:
        """Continue where `state` was taken. Raises DatasetError where the demonstrations are others."""
        try:
            self._leased.load_state_dict(state)
        except DatasetError as change:
            if not ignore_changes:
                raise
            logger.warning("%s. Ignored: the run continues with these demonstrations.", change)

    async def take(self, version: int) -> tuple[RolloutBatch, dict[str, float]]:
        """Return the next batch, packed, and the figures of the lease, the workflow and the rewards, when the samples
        of the last one are in their file. Raises OSError where samples could not be written, and what ended the
        sampling."""
        batch = await self._leased.take(version)
        figures = self._leased.stats() | batch.workflow_figures() | {ROLLOUT: peak_gib()}
        return batch, figures | batch.reward_figures(self._right_at)

    async def write_samples(self) -> None:
        """Start writing the samples of the batch that was taken last. Call once after each take()."""
        await self._leased.write_samples()

    def trained(self, step: int) -> None:
        """Count the steps before `step` as trained."""
        self._leased.trained(step)

    async def notable(self) -> list[Sample]:
        """Return the best, worst and longest answer of the last batch that was written."""
        return await self._leased.notable()

    async def state_dict(self) -> dict[str, Any]:
        """Return what the store does not hold. The checkpoint before this one is on the disk."""
        return await self._leased.state_dict()

    async def close(self) -> None:
        """Count what was trained as trained for good, and end the writing of samples."""
        self._leased.end()
        await self.samples.close()


class BatchService:
    """Leases from a store that explore jobs fill. See RolloutService for the calls."""

    def __init__(self, settings: RolloutSettings) -> None:
        self._data = RunData(settings)
        self._rules = self._data.rules()
        self._experience = settings.store.open()
        self._experience.enroll(settings.lessee)
        self._batches = Batches(settings, self._data, self._experience, self._rules)
        self._version = 0

    async def start(self) -> None:
        """Do nothing: no worker process is needed."""

    def describe(self) -> DataFacts:
        """Return facts about the prompts."""
        return self._data.facts()

    async def begin(self, version: int, state: Any, *, ignore_changes: bool) -> None:
        """Begin at the step `version`."""
        if state is not None:
            self._batches.load_state_dict(state.get("batches", {}), ignore_changes=ignore_changes)
        self._batches.samples.begin(version)
        self.set_version(version)

    async def take(self, version: int) -> tuple[RolloutBatch, dict[str, float]]:
        """See Batches."""
        batch, figures = await self._batches.take(version)
        status = self._experience.status()
        ready = {"rollout/num_ready": float(status.num_ready), "rollout/num_outstanding": float(status.num_outstanding)}
        return batch, figures | ready

    async def write_samples(self) -> None:
        """See Batches."""
        await self._batches.write_samples()

    def set_version(self, version: int) -> None:
        """Count the steps before `version` as trained."""
        self._version = version
        self._batches.trained(version)

    async def samples(self) -> list[Sample]:
        """Return the best, worst and longest answer of the last batch that was written."""
        return await self._batches.notable()

    async def state_dict(self) -> Any:
        """Return the state that `begin` needs."""
        batches = await self._batches.state_dict()
        stream = {"settings": dict(self._rules.settings), "dataset": self._data.prompts.state_dict()}
        return {"producer": stream | {"version": self._version}, "batches": batches}

    async def close(self) -> None:
        """Leave the store to another trainer."""
        await self._batches.close()
        self._experience.close()
