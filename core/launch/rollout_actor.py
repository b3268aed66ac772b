"""The Ray actor of the rollout side: data set, producer, experience and rewards."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from core.launch.generator_actor import ActorGenerator
from core.monitoring.logs import log_to_file
from core.processes.stacks import forget_modules
from core.rollout_settings import RolloutSettings

if TYPE_CHECKING:
    from core.data.rollout_batch import RolloutBatch

logger = logging.getLogger(__name__)


class RolloutActor:
    """The rollout side: data set, producer, experience and rewards, in one event loop.

    A plain class, so that calls on it are typed; RolloutClient makes the Ray actor of it."""

    def __init__(self, name: str, log_file: str, generators: Sequence[Any], settings: RolloutSettings):
        log_to_file(name, log_file)
        torch.set_num_threads(1)
        self._generators, self._settings = generators, settings

    async def start(self) -> dict[str, Any]:
        from core.rollout_service import RolloutService

        self._service = RolloutService([ActorGenerator(a) for a in self._generators], self._settings)
        await self._service.start()
        forget_modules()
        return self._service.describe()

    async def begin(self, version: int, state: Any, ignore_changes: bool) -> None:
        await self._service.begin(version, state, ignore_changes=ignore_changes)

    async def take(self, version: int) -> tuple[RolloutBatch, dict[str, float]]:
        return await self._service.take(version)

    async def set_version(self, version: int) -> None:
        self._service.set_version(version)

    async def lost_generators(self) -> dict[int, str]:
        """Return the generators that do not answer here, by index, with the reason."""
        return self._service.router.lost()

    async def replace_generator(self, index: int, actor: Any) -> None:
        """Use `actor`, another process with the weights of the current version, in place of a lost generator."""
        self._service.router.replace(index, ActorGenerator(actor))

    async def evaluate(self) -> dict[str, float]:
        return await self._service.evaluate()

    async def state_dict(self) -> Any:
        return await self._service.state_dict()

    async def close(self) -> None:
        await self._service.close()
