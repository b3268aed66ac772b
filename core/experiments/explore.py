"""Jobs with generators and without a trainer. explore: sample into the store of a train job, with the weights that it
publishes. bench: evaluate models on every evaluation set. serve: keep the generators up behind one address.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from core.experiments.context import wait_facts
from core.experiments.workers import make_push, start_generators
from core.launch.remote import has_ended
from core.launch.rollout_client import RolloutActor, RolloutClient
from core.launch.trainer_group import PublishedWeights
from core.monitoring.logs import NOTICE
from core.monitoring.metrics import Journal, read_rows
from core.placement.allocation import resolve_allocation
from core.train.periodic import DueTimer, Evaluations, Frequency
from core.weight_sync.folder import VersionFolder
from rollout.inference.registry import BACKENDS, choose_transport
from rollout.inference.versions import Published, Subscription

if TYPE_CHECKING:
    from core.config.experiments import PPOMATHConfig
    from core.experiments.context import RunContext
    from core.weight_sync.push import WeightPush
    from rollout.experience.schedule import Schedule

logger = logging.getLogger(__name__)

_LOOK_EVERY_SECONDS = 0.2
"""Seconds between two looks for a new version."""


def load(model: str, version: int, weights: PublishedWeights, push: WeightPush) -> None:
    """Let the generators load a Hugging Face folder as `version`."""
    weights.current = Published(version=version, where=str(Path(model).expanduser()))
    push.push(version)


def follow(subscription: Subscription, weights: PublishedWeights, push: WeightPush) -> int | None:
    """Bring the generators to the latest version and return it; None where they have it already."""
    published = subscription.claim()
    if published is None:
        return None
    weights.current = published
    push.push(published.version)
    subscription.hold(published.version)
    return published.version


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
        generators.wait_started()
        by_files = "local" not in BACKENDS[placed.backend].capabilities.transports
        transport = choose_transport("disk" if by_files else "local", allocation)
        push = make_push(config, allocation, weights, generators, rollout, transport=transport, folder=folder)
        push.connect()
        yield push, rollout, schedule
        rollout.close()
        push.close()
        generators.close()


def explore(config: PPOMATHConfig, context: RunContext) -> None:
    """Sample with each version that a train job publishes, until the last one; into files, with the weights of
    actor.path until every prompt is sampled."""
    if config.experience.is_read_by_people:
        _explore_alone(config, context)
    else:
        _explore(config, context)


def _explore_alone(config: PPOMATHConfig, context: RunContext) -> None:
    weights = PublishedWeights()
    with sampling(config, context, weights, context.paths.checkpoints / "push") as (push, rollout, schedule):
        load(config.model_folder, 0, weights, push)
        context.screen.end_phase()
        rollout.call(RolloutActor.begin, 0, None, False)
        while not rollout.call(RolloutActor.has_explored, schedule.total_prompts):
            rollout.call(RolloutActor.check)
            push.sync_rejoined()
            time.sleep(_LOOK_EVERY_SECONDS)


def _explore(config: PPOMATHConfig, context: RunContext) -> None:
    screen, weights, folder = context.screen, PublishedWeights(), VersionFolder(config.weights_folder)
    with sampling(config, context, weights, folder.path) as (push, rollout, schedule):
        screen.begin("waiting for the first weights")
        logger.info("Following the weights in %s.", folder.path)
        with folder.subscribe_process(context.paths.logs.name) as subscription:
            version = None
            evaluations = _Evaluations(config, context, schedule, rollout, push)
            while version is None or version < schedule.total_steps:
                rollout.call(RolloutActor.check)
                evaluations.look()
                if (newer := follow(subscription, weights, push)) is None:
                    push.sync_rejoined()
                    if config.synchronizer.on_request and version is not None:
                        wanted = config.synchronizer.interval * schedule.batch_size
                        if rollout.call(RolloutActor.has_explored, wanted):
                            folder.request(version)
                    time.sleep(_LOOK_EVERY_SECONDS)
                    continue
                if version is None:
                    screen.end_phase()
                    rollout.call(RolloutActor.begin, newer, None, False)
                else:
                    rollout.set_version(newer)
                version = newer
                evaluations.begin_if_due(version)
                context.attempt.report(step=version)
                logger.info("Sampling with version %d of %d.", version, schedule.total_steps, extra=NOTICE)
            evaluations.close()


class _Evaluations:
    """Evaluates the versions of an explore job that are due. What falls due while an evaluation runs is measured with
    the first version after it."""

    def __init__(
        self, config: PPOMATHConfig, context: RunContext, schedule: Schedule, rollout: RolloutClient, push: WeightPush
    ) -> None:
        self._schedule, self._evaluates = schedule, config.evaluates
        self._at_start = config.exp_ctrl.eval_at_start
        self._journal = Journal(context.paths.logs / "metrics.jsonl", continue_after=None)
        self._done = {row["step"] for row in read_rows(context.paths.logs / "metrics.jsonl")}
        self._timer = DueTimer(Frequency(*config.exp_ctrl.eval_frequency), now=time.monotonic())
        self._last = 0
        self._running = Evaluations(
            rollout,
            push.generators if config.evaluation.beside else None,
            report=self._report,
            is_done=has_ended,
            meanwhile=push.sync_rejoined,
        )

    def _report(self, step: int, figures: Mapping[str, float]) -> None:
        row = {f"eval/{name}": value for name, value in figures.items()}
        logger.info("Evaluation of version %d: %s", step, row)
        self._journal.write(step, row)

    def look(self) -> None:
        """File an evaluation that has ended."""
        self._running.look()

    def begin_if_due(self, version: int) -> None:
        """Evaluate a version that every generator has, if one has been due since the last evaluation."""
        if not self._evaluates:
            return
        if self._running.step is not None:
            if version < self._schedule.total_steps:
                return
            self._running.finish()
        due = version == 0 and self._at_start
        for step in range(self._last + 1, version + 1):  # versions that were not followed count as well
            due |= self._timer.due_after(step, self._schedule, now=time.monotonic())
        self._last = version
        if due and version not in self._done:
            self._running.begin(version)

    def close(self) -> None:
        """Wait for the last evaluation."""
        self._running.finish()
        self._journal.close()


def bench(config: PPOMATHConfig, context: RunContext) -> None:
    """Evaluate each model of bench.models, and write a row for each into metrics.jsonl."""
    screen, weights, rows = context.screen, PublishedWeights(), []
    journal = Journal(context.paths.logs / "metrics.jsonl", continue_after=-1)
    with closing(journal), sampling(config, context, weights, context.paths.checkpoints / "push") as (push, rollout, _):
        for number, model in enumerate(config.bench.models):
            screen.begin(f"evaluating {model}")
            load(model, number, weights, push)
            figures = {f"eval/{name}": value for name, value in rollout.evaluate(number, push.sync_rejoined).items()}
            journal.write(number, {"model": model, **figures})
            rows.append((model, figures))
        screen.end_phase()
        screen.show(_table(rows))


def _table(rows: list[tuple[str, dict[str, float]]]) -> Table:
    table = Table(title="Evaluation", title_justify="left")
    table.add_column("model")
    for name in rows[0][1]:
        table.add_column(name.removeprefix("eval/"), justify="right")
    for model, figures in rows:
        table.add_row(model, *(f"{value:.4g}" for value in figures.values()))
    return table


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
            load(config.serve.model or config.model_folder, version, weights, push)
        rollout.call(RolloutActor.follow, version)
        url = rollout.call(RolloutActor.serve)
        context.screen.end_phase()
        logger.info("Serving version %d at %s/v1", version, url, extra=NOTICE)
        while True:
            time.sleep(_LOOK_EVERY_SECONDS)
            push.sync_rejoined()
            if subscription is not None and (newer := follow(subscription, weights, push)) is not None:
                rollout.call(RolloutActor.follow, newer)
                logger.info("Serving version %d.", newer, extra=NOTICE)
