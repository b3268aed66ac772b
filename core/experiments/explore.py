"""An explore job: it samples into the store of a train job, with the weights that this one publishes."""

from __future__ import annotations

import logging
import os
import socket
import time
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

logger = logging.getLogger(__name__)

_LOOK_EVERY_SECONDS = 0.2
"""For a new version."""


def explore(config: PPOMATHConfig, context: RunContext) -> None:
    """Sample until the last version of the weights is published."""
    allocation, screen = resolve_allocation(config), context.screen
    patience, placed = config.launch.startup_timeout_seconds, allocation.generator
    screen.begin("starting Ray")
    with context.cluster(num_actors=len(placed.slots) + 1) as cluster:
        screen.begin("starting the processes")
        cluster.reserve(allocation.only(placed.role))
        generators, rollout = start_generators(config, allocation, cluster, context.memory)
        _, schedule = wait_facts(config, rollout)
        generators.wait_started(patience)
        weights, folder = PublishedWeights(), VersionFolder(config.weights_folder)
        transport = transport_of(placed.backend)
        push = make_push(config, allocation, weights, generators, rollout, requested=transport, folder=folder.path)
        push.connect()
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
        rollout.close()
        push.close()
        generators.close()
