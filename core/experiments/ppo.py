"""Puts a job of ppo-math together: cluster, trainer ranks, generators, rollout side; then core/trainer.py takes over.

Jobs without a trainer: explore samples into the store of a train job, with the weights that it publishes; bench
evaluates models on every evaluation set; serve keeps the generators up behind one address.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from rich.table import Table

from allocation import Allocation
from core.algorithms.build import build_algorithm
from core.config.common import Job
from core.config.experiments import PPOMATHConfig
from core.experiments.context import RunContext, wait_facts
from core.experiments.workers import TrainerSide, build_ppo_engines, make_push, start_generators, start_trainer
from core.explore.data import DataFacts
from core.launch.cluster import Cluster
from core.launch.generators import GeneratorPool
from core.launch.remote import has_ended
from core.launch.rollout_client import BatchActor, RolloutActor, RolloutClient
from core.launch.trainer_group import PublishedWeights, TrainerGroup
from core.monitoring.logs import NOTICE
from core.monitoring.metrics import Journal, read_rows
from core.monitoring.screen import Screen
from core.placement import resolve_allocation, started, transport_of
from core.processes.stacks import forget_modules
from core.runs.paths import RunPaths
from core.train.periodic import DueTimer, Evaluations, Frequency
from core.train.step_batch import SavedSteps
from core.trainer import PPOTrainer, WeightUpdates
from core.weight_sync.folder import FOLDER_ALONE, Published, VersionFolder, name_of_process
from core.weight_sync.jobs import JobServers, TrainerLink
from core.weight_sync.publisher import Group, Publisher
from core.weight_sync.push import PUSHED, WeightPush
from rollout.experience import Schedule
from rollout.inference.registry import BACKENDS, BROADCAST, choose_transport

if TYPE_CHECKING:
    from core.processes.supervise import Attempt

_LOOK_EVERY_SECONDS = 0.2
"""Seconds between two looks for a new version."""


def load(model: str, version: int, weights: PublishedWeights, push: WeightPush) -> None:
    """Let the generators load a Hugging Face folder as `version`."""
    weights.current = Published(version=version, where=str(Path(model).expanduser()))
    push.push(version)


class Follower:
    """Brings the generators of a job to the newest version that a train job has published: through its group where the
    two are connected, else from its folder."""

    def __init__(self, config: PPOMATHConfig, context: RunContext, weights: PublishedWeights, push: WeightPush) -> None:
        self.folder = VersionFolder(config.weights_folder)
        self.version: int | None = None
        """The version of the generators."""
        self._weights, self._push = weights, push
        name = name_of_process(context.paths.logs.name)
        self._link = TrainerLink(
            self.folder, name, push, joins=config.synchronizer.broadcasts, timeout_seconds=config.push.timeout_seconds
        )
        self._link.connect()  # first: the train job writes the folder for a job that follows it unconnected
        self._subscription = self.folder.subscribe(name)
        logger.info("Following the weights in %s.", self.folder.path)

    def look(self) -> int | None:
        """Return the version that the generators have from now on, if it is a new one; None after a moment without."""
        if (pushed := self._link.look(self.version, wait_seconds=_LOOK_EVERY_SECONDS)) is not None:
            self._weights.current = None
            return self._hold(pushed)
        if (published := self._subscription.claim()) is not None:
            self._weights.current = published
            self._push.push(published.version)
            return self._hold(published.version)
        if self._weights.current is not None:
            self._push.sync_rejoined()
        else:  # the group has the weights of a generator that was started again
            self._push.generators.raise_if_all_gone()
        return None

    def _hold(self, version: int) -> int | None:
        self._subscription.hold(version)
        is_new, self.version = version != self.version, version
        return version if is_new else None

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *exception: object) -> None:
        self._subscription.close()


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
        cluster.reserve(started(config, allocation))
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
    screen, weights = context.screen, PublishedWeights()
    with sampling(config, context, weights, Path(config.weights_folder)) as (push, rollout, schedule):
        screen.begin("waiting for the first weights")
        with Follower(config, context, weights, push) as follower:
            version = None
            evaluations = _Evaluations(config, context, schedule, rollout, push)
            while version is None or version < schedule.total_steps:
                rollout.call(RolloutActor.check)
                evaluations.look()
                if (newer := follower.look()) is None:
                    if config.synchronizer.on_request and version is not None:
                        wanted = config.synchronizer.interval * config.dataset.train_bs_n_seqs
                        if rollout.call(RolloutActor.has_explored, wanted):
                            follower.folder.request(version)
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
            cast(GeneratorPool, push.generators) if config.evaluation.beside else None,
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
        follower = None
        if config.serve.follow:
            follower = stack.enter_context(Follower(config, context, weights, push))
            context.screen.begin("waiting for the first weights")
            while (version := follower.look()) is None:
                rollout.call(RolloutActor.check)
        else:
            version = 0
            load(config.serve.model or config.model_folder, version, weights, push)
        url = rollout.call(RolloutActor.serve)
        context.screen.end_phase()
        logger.info("Serving version %d at %s/v1", version, url, extra=NOTICE)
        while True:
            rollout.call(RolloutActor.check)
            if follower is None:
                push.sync_rejoined()
                time.sleep(_LOOK_EVERY_SECONDS)
            elif (newer := follower.look()) is not None:
                logger.info("Serving version %d.", newer, extra=NOTICE)


logger = logging.getLogger(__name__)


def run_ppo(config: PPOMATHConfig, paths: RunPaths, screen: Screen, attempt: Attempt) -> None:
    """Run one attempt of a job of any mode: from the beginning, or from the newest recover checkpoint."""
    # What the driver computes takes a millisecond; more threads would wait for the cores that the workers use.
    torch.set_num_threads(1)
    JOBS[config.job](config, RunContext.open(config, paths, screen, attempt))


def both(config: PPOMATHConfig, context: RunContext) -> None:
    """Explore and train in one job: the trainer pushes weights to its generators."""
    allocation, screen = resolve_allocation(config), context.screen
    num_actors = sum(len(role.slots) for role in allocation.roles.values()) + 1
    screen.begin("starting Ray")
    with context.cluster(num_actors=num_actors) as cluster:
        screen.begin("starting the processes")
        cluster.reserve(allocation)
        generators, rollout = start_generators(config, allocation, cluster, context.memory)
        trainer = start_trainer(config, allocation, cluster)
        trainer.groups.wait_started()
        facts, schedule = wait_facts(config, rollout)
        context = context.fitted_to(schedule)
        folder = context.paths.checkpoints / "push"
        ranks = trainer.actor.group
        transport = transport_of(config, allocation)
        weights = make_push(config, allocation, ranks, generators, rollout, transport=transport, folder=folder)
        load_beside(generators, weights, config, trainer, context, schedule, takes_turns=allocation.shares_gpus)
        _train(config, context, trainer, rollout, weights, schedule, facts, generators)
        rollout.close()
        weights.close()
        generators.close()


def train(config: PPOMATHConfig, context: RunContext) -> None:
    """Train on what explore jobs put into the store, and publish weights that they follow."""
    allocation, screen = resolve_allocation(config), context.screen
    ranks = started(config, allocation)
    screen.begin("starting Ray")
    with context.cluster(num_actors=sum(len(role.slots) for role in ranks.roles.values()) + 1) as cluster:
        screen.begin("starting the processes")
        cluster.reserve(ranks)
        rollout = RolloutClient(cluster, BatchActor, config)
        trainer = start_trainer(config, allocation, cluster)
        trainer.groups.wait_started()
        facts, schedule = wait_facts(config, rollout)
        versions = VersionFolder(config.weights_folder)  # after the store has refused a second train job
        group = _group(config, allocation, cluster, trainer.actor.group, rollout, versions)
        context = context.fitted_to(schedule)
        _load(config, trainer, context, schedule)
        weights = Publisher(
            lambda folder: trainer.actor.group.save_hf(PUSHED, str(folder), config.model_folder),
            versions,
            interval=config.synchronized.interval,
            on_request=config.synchronizer.on_request,
            last_step=schedule.total_steps,
            group=group,
        )
        _train(config, context, trainer, rollout, weights, schedule, facts, before_checkpoint=weights.before_checkpoint)
        rollout.close()


def _group(
    config: PPOMATHConfig,
    allocation: Allocation,
    cluster: Cluster,
    ranks: TrainerGroup,
    rollout: RolloutClient,
    versions: VersionFolder,
) -> Group | None:
    """Return the group of the train job and the jobs that connect to it, where weights are broadcast; announce in the
    folder where it is."""
    if not config.synchronizer.broadcasts:
        versions.announce(FOLDER_ALONE)
        return None
    jobs = JobServers(versions, cluster.address, timeout_seconds=config.push.timeout_seconds)
    push = make_push(config, allocation, ranks, jobs, rollout, transport=BROADCAST, folder=versions.path)
    return Group(jobs=jobs, push=push)


JOBS: Mapping[Job, Callable[[PPOMATHConfig, RunContext], None]] = {
    "both": both,
    "train": train,
    "explore": explore,
    "bench": bench,
    "serve": serve,
}
"""What each job runs."""


def load_beside(
    generators: GeneratorPool,
    weights: WeightPush,
    config: PPOMATHConfig,
    trainer: TrainerSide,
    context: RunContext,
    schedule: Schedule,
    *,
    takes_turns: bool,
) -> None:
    """Load the models while generators start, and connect both. `takes_turns`: they share GPUs."""
    if takes_turns:  # the servers size their cache first, then the engines find room
        generators.wait_started()
        weights.offload_generators()
    _load(config, trainer, context, schedule)
    generators.wait_started()
    weights.connect()


def _load(config: PPOMATHConfig, trainer: TrainerSide, context: RunContext, schedule: Schedule) -> None:
    """Load the models, and the checkpoint if there is one."""
    checkpoint = context.start.checkpoint
    context.screen.begin("loading the models")
    build_ppo_engines(config, trainer, total_updates=schedule.total_steps * config.num_minibatches)
    if checkpoint is not None:
        trainer.trained.load(checkpoint)
        done = context.start.state.step
        logger.info("Recovered from %s: %d steps are done.", checkpoint, done, extra=NOTICE)
    if config.recovers:  # not before: loading takes as much memory
        trainer.trained.prepare_saves()


def _train(
    config: PPOMATHConfig,
    context: RunContext,
    workers: TrainerSide,
    rollout: RolloutClient,
    weights: WeightUpdates,
    schedule: Schedule,
    facts: DataFacts,
    generators: GeneratorPool | None = None,
    before_checkpoint: Callable[[], None] = lambda: None,
) -> None:
    """Connect loop, monitor and periodic actions, give the generators their first weights, and train. `generators`:
    those of this job. `before_checkpoint`: is called before a recover checkpoint begins."""
    forget_modules()
    sample_steps = config.samples.shown_every
    context.screen.begin("sampling and training the first step")
    monitor = context.monitor(schedule, consumed=True, sample_steps=sample_steps)
    algorithm, start, timer = build_algorithm(config), context.start, context.timer()
    logger.info("Algorithm: %s; minibatches never split a %s.", config.algorithm_name, algorithm.unit)
    trainer = PPOTrainer(
        actor=workers.actor,
        critic=workers.critic,
        reference=workers.reference,
        rollout=rollout,
        weights=weights,
        memory=context.memory,
        algorithm=algorithm,
        sample_reuse=config.ppo.sample_reuse,
        num_minibatches=config.num_minibatches,
        temperature=config.ppo.gen.temperature,
        schedule=schedule,
        monitor=monitor,
        timer=timer,
        skipped_updates=context.skipped_updates(),
        saved_steps=_saved_steps(config, context.paths.logs / "batches"),
        mean_batch_tokens=facts.mean_prompt_tokens * schedule.batch_size,
    )

    evaluations = Evaluations(
        rollout,
        generators if config.evaluation.beside else None,
        report=monitor.evaluation,
        is_done=has_ended,
        meanwhile=weights.sync_rejoined,
    )
    evaluates = config.evaluates and config.job != "train"

    def driver_state() -> tuple[float, dict[str, object]]:
        before_checkpoint()
        return monitor.elapsed_seconds, {**trainer.state, "evaluating": evaluations.step}

    periodic = context.periodic(
        schedule,
        engines=workers.trained,
        tokenizer_from=config.model_folder,
        evaluations=evaluations if evaluates else None,
        rollout_state=rollout.state_dict,
        driver_state=driver_state,
    )
    is_due = start.checkpoint is None and config.exp_ctrl.eval_at_start
    continues = start.checkpoint is not None and start.state.extra.get("evaluating") == start.state.step
    with monitor:
        weights.push(start.state.version)
        if evaluates and is_due:
            with timer("evaluate"):
                evaluations.begin(0)
        rollout.call(RolloutActor.begin, start.state.version, start.rollout_state, context.ignores_changes)
        if evaluates and continues:
            evaluations.begin(start.state.step)
        with context.recover, periodic.saved_at_interrupt():
            trainer.run(start.state, periodic)


def _saved_steps(config: PPOMATHConfig, folder: Path) -> SavedSteps | None:
    every = config.monitor.save_batches
    name, settings = config.algorithm_case
    return SavedSteps(folder=folder, every=every, name=name, settings=settings) if every else None
