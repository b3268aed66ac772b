"""A serve job: it keeps the generators up behind one address, and samples nothing by itself."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from core.experiments.explore import sampling
from core.launch.published import PublishedWeights, follow, load
from core.monitoring.logs import NOTICE
from core.weight_sync.folder import VersionFolder

if TYPE_CHECKING:
    from core.config.experiments import PPOMATHConfig
    from core.experiments.context import RunContext

logger = logging.getLogger(__name__)

_LOOK_EVERY_SECONDS = 0.5


def serve(config: PPOMATHConfig, context: RunContext) -> None:
    """Answer requests until a signal ends the job."""
    weights = PublishedWeights()
    with (
        sampling(config, context, weights, context.paths.checkpoints / "push") as (push, rollout, _),
        ExitStack() as stack,
    ):
        subscription = None
        if config.serve.follow:
            folder = VersionFolder(config.weights_folder)
            subscription = stack.enter_context(folder.subscribe_process(context.paths.logs.name))
            context.screen.begin("waiting for the first weights")
            while (version := follow(subscription, weights, push)) is None:
                time.sleep(_LOOK_EVERY_SECONDS)
        else:
            version = 0
            load(config.serve.model or config.actor.path, version, weights, push)
        rollout.follow(version)
        url = rollout.serve()
        context.screen.end_phase()
        logger.info("Serving version %d at %s/v1", version, url, extra=NOTICE)
        while True:
            time.sleep(_LOOK_EVERY_SECONDS)
            push.sync_rejoined()
            if subscription is not None and (newer := follow(subscription, weights, push)) is not None:
                rollout.follow(newer)
                logger.info("Serving version %d.", newer, extra=NOTICE)
