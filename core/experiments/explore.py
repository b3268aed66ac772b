"""An explore job: it samples into the store of a train job, with the weights that this one publishes."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from core.experiments.common import wait_facts
from core.experiments.workers import make_push, start_generators
from core.launch.published import PublishedWeights, follow, transport_of
from core.monitoring.logs import NOTICE
from core.placement.allocation import resolve_allocation
from core.weight_sync.folder import VersionFolder

if TYPE_CHECKING:
    from core.config.experiments import PPOMATHConfig
    from core.experiments.context import RunContext
    from core.launch.rollout_client import RolloutClient
    from core.weight_sync.push import WeightPush
    from rollout.experience.schedule import Schedule

logger = logging.getLogger(__name__)

_LOOK_EVERY_SECONDS = 0.2
"""Seconds between two looks for a new version."""


@contextmanager
def sampling(
    config: PPOMATHConfig, context: RunContext, weights: PublishedWeights, folder: Path
) -> Iterator[tuple[WeightPush, RolloutClient, Schedule]]:
    """Yield the generators of a job without a trainer, ready for the first weights: their push, the rollout process and
    the schedule. `folder`: that of the weights."""
    allocation, screen = resolve_allocation(config), context.screen
    placed = allocation.generator
    screen.begin("starting Ray")
    with context.cluster(num_actors=len(placed.slots) + 1) as cluster:
        screen.begin("starting the processes")
        cluster.reserve(allocation.only(placed.role))
        generators, rollout = start_generators(config, allocation, cluster, context.memory)
        _, schedule = wait_facts(config, rollout)
        generators.wait_started(config.launch.startup_timeout_seconds)
        requested = transport_of(placed.backend)
        push = make_push(config, allocation, weights, generators, rollout, requested=requested, folder=folder)
        push.connect()
        yield push, rollout, schedule
        rollout.close()
        push.close()
        generators.close()


def explore(config: PPOMATHConfig, context: RunContext) -> None:
    """Sample until the last version of the weights is published."""
    screen, weights, folder = context.screen, PublishedWeights(), VersionFolder(config.weights_folder)
    with sampling(config, context, weights, folder.path) as (push, rollout, schedule):
        screen.begin("waiting for the first weights")
        logger.info("Following the weights in %s.", folder.path)
        with folder.subscribe(f"{context.paths.logs.name}-{socket.gethostname()}-{os.getpid()}") as subscription:
            version = None
            while version is None or version < schedule.total_steps:
                rollout.check()
                if (newer := follow(subscription, weights, push)) is None:
                    push.sync_rejoined()
                    time.sleep(_LOOK_EVERY_SECONDS)
                    continue
                if version is None:
                    screen.end_phase()
                    rollout.begin(newer, None, ignore_changes=False)
                else:
                    rollout.set_version(newer)
                version = newer
                context.attempt.report(step=version)
                logger.info("Sampling with version %d of %d.", version, schedule.total_steps, extra=NOTICE)
