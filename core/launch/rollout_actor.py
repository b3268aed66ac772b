"""The rollout services as Ray actors: their batches are in Ray's object store, and their generators are actors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from core.explore.batches import BatchService
from core.explore.service import RolloutService
from core.launch.generator_actor import ActorGenerator
from core.launch.remote import fetch, place
from core.monitoring.logs import log_to_file
from tracing import spanned

if TYPE_CHECKING:
    from core.config.experiments import PPOMATHConfig
    from core.data.stored_batch import Arrays, Ref


def put(arrays: Arrays) -> Ref:
    """Place arrays for the trainer's ranks."""
    return place(arrays, arrays.values())


def _prepare(name: str, log_file: str) -> None:
    log_to_file(name, log_file)
    torch.set_num_threads(1)


@spanned(leave_out=("lease", "samples"))
class BatchActor(BatchService):
    """The rollout process of a train job. A plain class, so that calls on it are typed; RolloutClient makes the Ray
    actor of it."""

    def __init__(self, name: str, log_file: str, config: PPOMATHConfig) -> None:
        _prepare(name, log_file)
        super().__init__(config, Path(log_file).parent, put=put, fetch=fetch)


@spanned(leave_out=("lease", "wait_lost", "samples", "check"))
class RolloutActor(RolloutService):
    """The rollout process of a run that samples: a plain class, as BatchActor."""

    def __init__(self, name: str, log_file: str, config: PPOMATHConfig, generators: Mapping[str, Any]) -> None:
        """`generators`: Ray's handles, by name."""
        _prepare(name, log_file)
        actors = {generator: ActorGenerator(actor) for generator, actor in generators.items()}
        super().__init__(actors, config, Path(log_file).parent, put=put, fetch=fetch)

    async def replace_generator(self, name: str, actor: Any) -> None:
        """Use `actor`, another process with the weights of the current version, in place of a lost generator."""
        self.router.replace(name, ActorGenerator(actor))
