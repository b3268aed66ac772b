"""The rollout services as Ray actors, whose batches are in Ray's object store and whose generators are actors, and the
actor as the training loop calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, TypeAlias, cast

import ray
import torch
from ray import ObjectRef
from ray.actor import ActorHandle

from core.config.experiments import PPOMATHConfig
from core.data.stored_batch import Arrays, Ref, StoredBatch, StoredFields
from core.explore.batches import BatchService
from core.explore.data import DataFacts
from core.explore.service import RolloutService
from core.launch.cluster import Cluster
from core.launch.generator_actor import ActorGenerator
from core.launch.remote import P, Pending, R, Remote, fetch, place
from core.monitoring.logs import log_to_file
from core.monitoring.samples import Sample
from core.train.step_batch import BatchFacts, BatchRequest, Scored, Scoring
from tracing import spanned

logger = logging.getLogger(__name__)


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

    def __init__(
        self,
        name: str,
        log_file: str,
        config: PPOMATHConfig,
        generators: Mapping[str, ActorHandle],
        auxiliary: Mapping[str, ActorHandle],
    ) -> None:
        """`generators`, and `auxiliary`, the servers of the auxiliary model: Ray's handles, by name."""
        _prepare(name, log_file)
        policy, frozen = (
            {name: ActorGenerator(actor) for name, actor in actors.items()} for actors in (generators, auxiliary)
        )
        super().__init__(policy, config, Path(log_file).parent, put=put, fetch=fetch, auxiliary=frozen)

    async def replace_generator(self, name: str, actor: ActorHandle) -> None:
        """Use `actor`, another process with the weights of the current version, in place of a lost generator."""
        self.router.replace(name, ActorGenerator(actor))


ScoredBatch: TypeAlias = "tuple[ObjectRef[StoredFields], Scored]"
"""A reference to what the ranks train on, and what the driver reports."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A batch, as the driver gets it: references to what the ranks read, and numbers."""

    batch: ObjectRef[StoredBatch]
    facts: BatchFacts
    figures: dict[str, float]
    """Of the producer."""
    scored: ScoredBatch | None
    """What RolloutClient.score() returns, where take() asked for it."""


class RolloutClient:
    """The rollout actor (data set, producer, experience, rewards) as the loop sees it."""

    def __init__(self, cluster: Cluster, actor_class: type[BatchActor | RolloutActor], *arguments: object) -> None:
        """`actor_class`: what runs in the process; without generators a BatchActor, which has fewer methods.
        `arguments`: of its constructor, after the name of its log file."""
        self._cluster = cluster
        actor = cluster.start_actor(ray.remote(actor_class), "rollout", *arguments)
        self._actor = Remote[RolloutActor](actor)
        self._starting = self._actor.send(RolloutActor.start)
        self._announced: list[ObjectRef[None]] = []
        self._taking: Sequence[Ref] = ()

    def call(self, method: Callable[Concatenate[RolloutActor, P], Pending[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of a method of the process, when what was announced is done."""
        return self._wait_call(self._actor.send(method, *args, **kwargs), method.__name__)

    def _wait_call(self, call: ObjectRef[R], phase: str) -> R:
        (limit, key), announced = self._cluster.deadlines.of_call, self._take_announced()
        return self._gather([*announced, call], phase, timeout_seconds=limit, key=key)

    def _take_announced(self) -> Sequence[Ref]:
        announced, self._announced = self._announced, []
        return announced

    def _gather(
        self,
        calls: Sequence[ObjectRef[R]],
        phase: str,
        *,
        timeout_seconds: float,
        key: str,
        meanwhile: Callable[[], None] = lambda: None,
        beside: list[ObjectRef[None]] | None = None,
    ) -> R:
        """Return the result of the last of `calls`."""
        return self._cluster.waiter.gather(
            calls, names=["rollout"] * len(calls), phase=phase, timeout_seconds=timeout_seconds,
            key=f"deadlines.{key}", meanwhile=meanwhile, beside=beside,
        )[-1]  # fmt: skip

    def wait_started(self) -> DataFacts:
        """Return facts about the prompts when the rollout side is up."""
        return self._cluster.gather_started([self._starting], names=["rollout"])[0]

    def take(self, request: BatchRequest, scoring: Scoring | None) -> None:
        """Let the rollout side choose and cut the next batch, oldest prompts first, and return at once. The batches
        before it count as consumed. `scoring`: compute the advantages too, which need no pass over the batch."""
        self._taking = self._actor.send_parts(3, RolloutActor.take, request, scoring)

    def wait_taken(self, meanwhile: Callable[[], None]) -> Taken:
        """Return the batch of the last take(); waits until the staleness bound can be kept, and calls `meanwhile` about
        once a second."""
        batch, fields, rest = self._taking
        # Prompts that set_version() starts keep the rollout side busy for a while.
        limit = self._cluster.deadlines.batch_seconds
        facts, figures, scored = self._gather(
            [rest], "take", timeout_seconds=limit, key="batch_seconds", meanwhile=meanwhile, beside=self._announced
        )
        with_fields = None if scored is None else (fields, scored)
        return Taken(batch=batch, facts=facts, figures=figures, scored=with_fields)

    def score(self, scoring: Scoring, results: Mapping[str, Sequence[Ref]]) -> ScoredBatch:
        """Return a reference to the fields to train on of the batch of the last take(), and what the driver reports.
        `results`: those of each pass, as the ranks returned them."""
        fields, rest = self._actor.send_parts(2, RolloutActor.score, scoring, results)
        return fields, self._wait_call(rest, "score")

    def write_samples(self) -> None:
        """Let the samples of the batch of the last take() be written. Returns at once, as set_version()."""
        self._announced.append(self._actor.send(RolloutActor.write_samples))

    def set_version(self, version: int) -> None:
        """Report that the generators now sample with this version, so that prompts are admitted. Returns at once; its
        error is raised by a later call, all of which wait for it but wait_taken()."""
        self._announced.append(self._actor.send(RolloutActor.set_version, version))

    def state_dict(self) -> object:
        return self.call(RolloutActor.state_dict)

    def samples(self) -> list[Sample]:
        """Return the best, worst and longest answer of the last batch as text; empty if samples.share=0."""
        return self.call(RolloutActor.samples)

    def evaluate(self, step: int, meanwhile: Callable[[], None]) -> dict[str, float]:
        """Return the figures of the evaluation sets under the weights of `step`. `meanwhile`: see wait_taken()."""
        return self.wait_evaluated(self._actor.send(RolloutActor.evaluate, step, None), meanwhile)

    def begin_evaluation(self, step: int, on: str) -> ObjectRef[dict[str, float]]:
        """Let the generator `on`, which keeps the weights of `step`, evaluate while others sample; return at once."""
        return self._actor.send(RolloutActor.evaluate, step, on)

    def wait_evaluated(self, call: ObjectRef[dict[str, float]], meanwhile: Callable[[], None]) -> dict[str, float]:
        """Return the result of an evaluation."""
        limit, calls = self._cluster.deadlines.batch_seconds, [*self._take_announced(), call]
        return self._gather(calls, "evaluate", timeout_seconds=limit, key="batch_seconds", meanwhile=meanwhile)

    def release_generator(self, name: str) -> None:
        """Let a generator that evaluated sample for training again; it has the current weights."""
        self._announced.append(self._actor.send(RolloutActor.release_generator, name))

    def wait_lost(self, known: Sequence[str]) -> ObjectRef[dict[str, str]]:
        """Return a reference to the lost generators, by name, with the reasons; it is there when one is lost that is
        not `known`."""
        return self._actor.send(RolloutActor.wait_lost, list(known))

    def check_generators(self) -> dict[str, str]:
        """Check the health of every generator now; return the lost ones, by name, with the reasons."""
        return self.call(RolloutActor.check_generators)

    def replace_generator(self, name: str, actor: object) -> None:
        """Allow requests to this generator from now on, in place of one that has failed."""
        self.call(RolloutActor.replace_generator, name, cast("ActorHandle", actor))

    def close(self) -> None:
        """Close the rollout side when it has done what was announced: calls that run at once have no order."""
        if announced := self._take_announced():
            limit, key = self._cluster.deadlines.of_call
            self._gather(announced, "close", timeout_seconds=limit, key=key)
        self.call(RolloutActor.close)
