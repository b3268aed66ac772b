"""The Ray actor of the rollout side: data set, producer, experience and rewards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from core.explore.settings import DataFacts, RolloutSettings
from core.launch.generator_actor import ActorGenerator
from core.launch.remote import fetch, place
from core.monitoring.logs import log_to_file
from core.processes.stacks import forget_modules
from core.train.step_batch import StepBatch
from tracing import spanned

if TYPE_CHECKING:
    from core.data.stored_batch import Arrays, Ref, StoredBatch, StoredFields
    from core.monitoring.samples import Sample
    from core.train.step_batch import BatchFacts, BatchRequest, Scored, Scoring

logger = logging.getLogger(__name__)

Figures = dict[str, float]


@spanned(leave_out=("wait_lost", "samples", "check"))
class RolloutActor:
    """The rollout side: data set, producer, experience and rewards, in one event loop.

    A plain class, so that calls on it are typed; RolloutClient makes the Ray actor of it."""

    def __init__(self, name: str, log_file: str, generators: Mapping[str, Any], settings: RolloutSettings):
        log_to_file(name, log_file)
        torch.set_num_threads(1)
        self._generators, self._settings = generators, settings
        self._batch: StepBatch | None = None

    async def start(self) -> DataFacts:
        from core.explore.batches import BatchService
        from core.explore.service import RolloutService

        generators = {name: ActorGenerator(actor) for name, actor in self._generators.items()}
        trains = self._settings.side == "train"
        # What a train job never calls (generators, evaluation) is what BatchService does not have.
        self._service: Any = BatchService(self._settings) if trains else RolloutService(generators, self._settings)
        await self._service.start()
        forget_modules()
        return self._service.describe()

    async def begin(self, version: int, state: Any, ignore_changes: bool) -> None:
        await self._service.begin(version, state, ignore_changes=ignore_changes)

    async def take(
        self, request: BatchRequest, scoring: Scoring | None
    ) -> tuple[StoredBatch, StoredFields | None, tuple[BatchFacts, Figures, Scored | None]]:
        """Return the next batch, and with `scoring` its advantages as score(), for the ranks; and what the driver
        reports of it: three results, of which the driver reads the third."""
        self._batch = None  # its memory is needed
        rollout, figures = await self._service.take(request.version)
        self._batch = await asyncio.to_thread(StepBatch, rollout, request, put=_place)
        fields, scored = (None, None) if scoring is None else await asyncio.to_thread(_score, self._batch, scoring, {})
        return self._batch.stored, fields, (self._batch.facts(), figures, scored)

    async def score(self, scoring: Scoring, results: Mapping[str, Sequence[Ref]]) -> tuple[StoredFields, Scored]:
        """Compute the advantages of the batch; return what the updates train on, and what the driver reports: as
        take(). Start writing its samples."""
        assert self._batch is not None, "take() comes first"
        await self._service.write_samples()
        return await asyncio.to_thread(_score, self._batch, scoring, results)

    async def write_samples(self) -> None:
        """Start writing the samples of the batch; not in take(), which runs before the evaluation of the previous
        step."""
        await self._service.write_samples()

    async def set_version(self, version: int) -> None:
        self._service.set_version(version)

    async def check(self) -> None:
        """Raise what ended the sampling, if anything has."""
        self._service.check()

    async def wait_lost(self, known: list[str]) -> dict[str, str]:
        """Return the lost generators with the reasons, when one is lost that is not `known`."""
        return await self._service.router.wait_lost(known)

    async def check_generators(self) -> dict[str, str]:
        """Check the health of every generator now; return the lost ones with the reasons."""
        return await self._service.router.check()

    async def replace_generator(self, name: str, actor: Any) -> None:
        """Use `actor`, another process with the weights of the current version, in place of a lost generator."""
        self._service.router.replace(name, ActorGenerator(actor))

    async def samples(self) -> list[Sample]:
        return await self._service.samples()

    async def evaluate(self) -> dict[str, float]:
        return await self._service.evaluate()

    async def state_dict(self) -> Any:
        return await self._service.state_dict()

    async def close(self) -> None:
        await self._service.close()


def _place(arrays: Arrays) -> Ref:
    return place(arrays, arrays.values())


def _score(batch: StepBatch, scoring: Scoring, results: Mapping[str, Sequence[Ref]]) -> tuple[StoredFields, Scored]:
    return batch.score(scoring, {name: fetch(placed) for name, placed in results.items()})
