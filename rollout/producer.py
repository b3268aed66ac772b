"""Keeps the generators busy: starts prompts as far ahead of the trainer as max_staleness allows.

One asyncio task per episode. An episode is started where that becomes possible: on entry, in set_version(), and when
a request of another episode ends; there is no loop to wake up. All calls belong to the thread of the event loop.
Invariant: every prompt of the stream is opened in order and put into the store exactly once, or dropped and counted
(dynamic sampling, a workflow that keeps failing), over failures and restarts. How old it may be then is bounded by
admission and selection (rollout/experience/).
"""

import asyncio
import logging
import math
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

from rollout.data.task_sets import TaskSets
from rollout.environments.pool import EnvironmentLostError
from rollout.errors import ErrorPolicy
from rollout.experience import Episode, Experience, Rules, Tags, episode_id
from rollout.experience.episode import SLOW, Processor, is_dropped, make_episode
from rollout.journal import JournaledSampler
from rollout.plugins import user_place
from rollout.time_limit import DynamicLimit, within
from rollout.types import Prompt, ReportingSampler, Workflow
from rollout.workflow_calls import CUT_TOKENS, GroupLimits, as_failure, check_group, check_sampled, outcome_of

logger = logging.getLogger(__name__)


class RolloutProducer:
    """Prompts in, finished episodes out, into a store. `async with` starts the first prompts and cancels the last."""

    def __init__(
        self,
        dataset: TaskSets,
        workflow: Workflow,
        generator: ReportingSampler,
        experience: Experience,
        rules: Rules,
        *,
        max_in_flight: int | None = None,
        group_size: int | Mapping[str, int] = 1,
        max_retries: int = 3,
        timeout_seconds: float | None = None,
        dynamic_timeout: float | None = None,
        limits: GroupLimits | None = None,
        errors: ErrorPolicy | None = None,
        processors: Sequence[Processor] = (),
        stats_sources: Sequence[Callable[[], Mapping[str, float]]] = (),
    ) -> None:
        """`rules`: which prompts start (make_rules). `group_size`: of every prompt, or by task set.

        While the generators have fewer requests than `max_in_flight`, prompts are started, each of which counts as
        `group_size` requests until it has sent more or ended that many; best a little more than what the generators run
        at once, as what only queues there ages for nothing. A workflow that raises is run again `max_retries` times,
        with the same seeds, and so is one that takes `timeout_seconds` beside generation and scoring. It begins anew;
        only the first retry after the end of an environment's worker goes on with what the episode has. Then `errors`
        decides: the episode is skipped, or the store fails. None: it fails. A prompt that takes `dynamic_timeout` times
        the mean of those of the last batch is late, and not run again. `limits`: what else than `group_size` a group
        must keep. `processors`: get every finished episode. `stats_sources` are added to stats(): a reward pool's, a
        router's.
        """
        sizes = [*group_size.values()] if isinstance(group_size, Mapping) else [group_size]
        for name, value, least in (
            ("max_in_flight", max_in_flight, 1), ("group_size", min(sizes), 1), ("max_retries", max_retries, 0),
        ):  # fmt: skip
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        self._experience, self._rules = experience, rules
        self._dataset = dataset
        self._workflow = workflow
        self._generator = generator
        self._max_in_flight = max_in_flight
        self._group_size = group_size
        self._load = _Load()  # of all episodes
        self._max_retries, self._timeout_seconds = max_retries, timeout_seconds
        self._limits = limits or GroupLimits()
        self._slow = None if dynamic_timeout is None else DynamicLimit(dynamic_timeout, rules.schedule.batch_size)
        self._next_look: asyncio.TimerHandle | None = None  # for episodes that exceed it
        self._began: dict[str, float] = {}  # by id, in this order
        self._processors = processors
        self._errors = errors or ErrorPolicy(on_error="fail")
        self._stats_sources = (dataset.stats, *stats_sources)
        self._version = self._num_finished = 0
        self._again: list[Tags] = []  # in flight in the store without a process that samples them, as opened
        self._journals: dict[str, JournaledSampler] = {}  # by id, of the episodes that run
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by id
        self._running = False
        self._is_refused = False
        """Whether the store admits no prompt before an episode ends or a version comes."""
        self._failure: Exception | None = None
        counted = (
            "num_prompts", "num_trajectories", "num_tokens", "num_cut", "num_failures", "num_skipped",
            "num_replayed_tokens", "num_lost_tokens",
        )  # fmt: skip
        self._counts = dict.fromkeys(counted, 0)

    async def __aenter__(self) -> Self:
        self._running = True
        self._dataset.connect(self._experience)
        self._again.extend(self._experience.adopt())
        self._dataset.seek(self._experience.status().num_opened)
        self._start_prompts()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._running = False
        if self._next_look is not None:
            self._next_look.cancel()
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def set_version(self, version: int) -> None:
        """Start the prompts that weights of `version` allow."""
        if version < self._version:
            raise ValueError(f"set_version({version}): the weights are at version {self._version} already")
        self._version, self._num_finished = version, 0
        self._end_late()
        self._again.extend(self._experience.adopt())
        self._start_prompts()
        self._end_slow()  # looks at those that have started

    def _end_late(self) -> None:
        """Stop the episodes that a step has given up, which nothing trains on."""
        running = self._tasks.keys() & self._journals.keys()
        for id in running - {tags.id for tags in self._experience.in_flight()}:
            self._stop(id)

    def _stop(self, id: str) -> None:
        logger.debug("prompt %s is late: its sampling ends", id)
        self._began.pop(id, None)
        self._tasks[id].cancel()
        self._journals.pop(id).end()

    def _end_slow(self) -> None:
        """Stop the episodes that exceed the dynamic time limit. Look again when the next one may."""
        if self._slow is None or not self._running:
            return
        loop, limit = asyncio.get_running_loop(), self._slow.seconds
        for id, began in [*self._began.items()]:
            if loop.time() < began + limit:
                break
            if id in self._journals:
                self._slow.add(loop.time() - began)
                self._experience.drop(id, reason=SLOW)
                self._stop(id)
        self._start_prompts()
        if self._next_look is not None:
            self._next_look.cancel()
        if self._began and limit < math.inf:
            self._next_look = loop.call_at(next(iter(self._began.values())) + limit, self._look_again)

    def _look_again(self) -> None:
        try:
            self._end_slow()
        except Exception as error:  # noqa: BLE001 - the store failed: without its error, leases would wait forever
            self._running = False
            self.fail(error)

    @property
    def num_finished(self) -> int:
        """Episodes that have finished since the last set_version()."""
        return self._num_finished

    @property
    def is_idle(self) -> bool:
        """True if no episode is sampled: admission holds the next one back."""
        return not self._tasks

    def check(self) -> None:
        """Raise the error that the store got from fail(), if there is one."""
        if self._failure is not None:
            raise self._failure

    def stats(self) -> dict[str, float]:
        """Return the metrics: counts since the start, sizes now, and the share of max_in_flight that the generators had
        on average since the last call."""
        store = self._experience.status()
        stats = {f"rollout/{name}": float(value) for name, value in self._counts.items()}
        stats |= {
            "rollout/num_in_flight": float(len(self._tasks)), "rollout/version": float(self._version),
            "rollout/num_ready": float(store.num_ready), "rollout/num_outstanding": float(store.num_outstanding),
        }  # fmt: skip
        if self._max_in_flight is not None:
            stats["rollout/generators_busy"] = min(1.0, self._load.mean() / self._max_in_flight)
        for source in self._stats_sources:
            stats |= source()
        return stats

    async def record_partial(self) -> None:
        """Record in the store what the requests in flight have sampled so far. A state of the store that is taken
        before the next await is of the same moment."""
        sampled = await self._generator.partial()
        for journal in self._journals.values():
            journal.record_partial(sampled)

    def state_dict(self) -> dict[str, Any]:
        """Return, as plain types, what the store does not hold."""
        return {
            "settings": dict(self._rules.settings),
            "dataset": self._dataset.state_dict(),
            "version": self._version,
            "counts": dict(self._counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; call before `async with`, with the store of then. Raises ValueError where
        settings or data set are others."""
        assert not self._running, "load_state_dict() comes before `async with`"
        for name, before in state["settings"].items():
            if before != self._rules.settings[name]:
                raise ValueError(
                    f"{name}={self._rules.settings[name]}, but the recover checkpoint was written with {before}: set "
                    "it back, allow the change with recover_ignore_changes=true, or start afresh with "
                    "recover_mode=disabled"
                )
        self._dataset.load_state_dict(state["dataset"])
        self._version = state["version"]
        self._counts |= state["counts"]

    def begin_at(self, step: int, *, reason: str) -> None:
        """Begin with the prompts of `step`, nothing of which is sampled."""
        self._version = step
        position = self._rules.schedule.consumed_before(step)
        self._experience.begin_at(step, num_opened=position)
        logger.warning("%s. Finished and running completions are dropped; continuing at prompt %d.", reason, position)

    def _start_prompts(self) -> None:
        self._is_refused = False
        while self._running and (self._max_in_flight is None or self._load.requests < self._max_in_flight):
            if (left := self._take_left()) is not None:
                tags = left
                prompt = self._dataset.find(tags.task_set, tags.row, tags.epoch)
            else:
                if not self._dataset.is_fixed and self._is_full():  # a curriculum decides as late as possible
                    self._is_refused = True
                    return
                prompt = self._dataset.at(self._dataset.position)
                tags = self._tags(prompt)
                opened = self._experience.open(tags, self._rules.admission)
                if opened == "full":
                    self._is_refused = True
                    return
                if opened == "known":  # another process samples it
                    self._dataset.seek(self._dataset.position + 1)
                    continue
                logger.debug("prompt %d (%s) is admitted at version %d", self._dataset.position, tags.id, self._version)
                self._dataset.seek(self._dataset.position + 1)
            task = asyncio.create_task(self._run_episode(tags, prompt, self._open_journal(tags.id, prompt)))
            self._tasks[tags.id] = task
            self._began[tags.id] = asyncio.get_running_loop().time()
            task.add_done_callback(partial(self._on_task_end, tags.id))

    def _take_left(self) -> Tags | None:
        """Return an episode in flight that another process has left, if one can be continued. Those that newer weights
        have begun wait for these: a token of older weights would be due before the episode."""
        for place, tags in enumerate(self._again):
            if tags.version <= self._version:
                return self._again.pop(place)
        return None

    def _is_full(self) -> bool:
        store = self._experience.status()
        admits = self._rules.admission.admits
        return not admits(store.num_outstanding, next_step=store.next_step, version=self._version)

    def _tags(self, prompt: Prompt) -> Tags:
        id = episode_id(prompt)
        return Tags(
            id=id, group_id=id, task=prompt.task, row=prompt.query_id, epoch=prompt.epoch, task_set=prompt.task_set,
            version=self._version,
        )  # fmt: skip

    def _group_size_of(self, prompt: Prompt) -> int:
        return self._group_size[prompt.task_set] if isinstance(self._group_size, Mapping) else self._group_size

    def _open_journal(self, id: str, prompt: Prompt) -> JournaledSampler:
        journal = JournaledSampler(
            self._generator, self._experience, id, num_expected=self._group_size_of(prompt), on_change=self._on_load
        )
        self._journals[id] = journal
        self._load.add(journal.load)
        return journal

    def _on_load(self, difference: int) -> None:
        self._load.add(difference)
        if not self._is_refused:
            self._start_prompts()

    async def _run_episode(self, tags: Tags, prompt: Prompt, journal: JournaledSampler) -> None:
        """Run the workflow until it succeeds once; end with put() or, out of retries, with drop() or fail()."""
        for attempt in range(1, self._max_retries + 2):
            outcome = await outcome_of(partial(self._sample, tags, prompt, journal), fatal=self._errors.always_fatal)
            if not isinstance(outcome, Exception):
                self._finish(outcome)
                return
            self._counts["num_failures"] += 1
            logger.warning(
                "%s: attempt %d of %d failed: %s", prompt.query_id, attempt, self._max_retries + 1, _shown(outcome)
            )
            if attempt > self._max_retries:
                self._give_up(tags, prompt, outcome)
                return
            journal.end()
            if attempt > 1 or not isinstance(outcome, EnvironmentLostError):  # else it goes on with what it has
                self._experience.reopen(tags.id, self._version)
            journal = self._open_journal(tags.id, prompt)

    async def _sample(self, tags: Tags, prompt: Prompt, journal: JournaledSampler) -> Episode:
        journal.enter()
        answer = await within(self._timeout_seconds, partial(self._workflow.run, prompt, journal))
        # Tokens of a version that is pushed, and not yet announced to the producer, are no mistake.
        limits = replace(self._limits, group_size=self._group_size_of(prompt))
        check = partial(check_group, prompt=prompt, version=self._version + 1)
        group = check(answer, limits=limits)
        kept = partial(check, limits=replace(limits, group_size=1))
        episode = make_episode(tags, group, self._processors, kept)
        if journal.completions:
            check_sampled(episode.trajectories, journal.completions, prompt)
        return episode

    def _finish(self, episode: Episode) -> None:
        """Store an episode. Start others: its requests are over, and one that is dropped makes room."""
        self._errors.count(failed=False)
        tags, group, spread = episode.tags, episode.trajectories, self._rules.spread
        self._num_finished += 1
        self._counts["num_prompts"] += 1
        self._counts["num_trajectories"] += len(group)
        self._counts["num_tokens"] += sum(episode.tags.trained)
        self._counts["num_cut"] += sum(CUT_TOKENS in t.metrics for t in group)
        logger.debug("prompt %s has %d finished trajectories", tags.id, len(group))
        drops = is_dropped if tags.reason else None if spread is None else spread.drops
        self._experience.put(episode, drops)
        journal = self._journals.pop(tags.id)
        journal.end()
        self._counts["num_replayed_tokens"] += journal.num_replayed
        self._counts["num_lost_tokens"] += journal.num_lost
        if self._slow is not None:
            self._slow.add(asyncio.get_running_loop().time() - self._began.pop(tags.id))
        self._start_prompts()
        self._end_slow()

    def _on_task_end(self, id: str, task: asyncio.Task[None]) -> None:
        """Fail the store when the task of an episode has ended in any other way than _run_episode has planned:
        otherwise its step would wait for the episode forever."""
        del self._tasks[id]
        self._began.pop(id, None)
        if task.cancelled():
            if not self._running or id not in self._journals:
                return
            error: BaseException = RuntimeError("the task of a prompt was cancelled from outside of the producer")
        elif (raised := task.exception()) is None:
            return
        else:
            error = raised
        self._running = False
        failure = as_failure(error)
        failure.add_note(f"the task of prompt {id} ended unexpectedly")
        logger.error("prompt %s: its task ended unexpectedly: %s", id, _shown(failure), exc_info=failure)
        self.fail(failure)

    def fail(self, error: Exception) -> None:
        """End the run with this error."""
        self._failure = _portable(error)
        self._experience.fail(self._failure)

    def _give_up(self, tags: Tags, prompt: Prompt, error: Exception) -> None:
        """Skip an episode whose workflow kept failing, or end the run with its error."""
        error.add_note(f"sampling prompt {prompt.query_id} of epoch {prompt.epoch}, attempt {self._max_retries + 1}, "
                       "the last")  # fmt: skip
        self._errors.count(failed=True)
        if failure := self._errors.ends_run(error, runs=self._max_retries + 1):
            self._running = False
            self.fail(failure)
            return
        self._counts["num_skipped"] += 1
        logger.warning(
            "%s: skipped after %d attempts (workflow.on_error=skip; %d prompts so far): %s", prompt.query_id,
            self._max_retries + 1, self._counts["num_skipped"], _shown(error),
        )  # fmt: skip
        self._experience.drop(tags.id)
        self._journals.pop(tags.id).end()
        self._start_prompts()


class _Load:
    """Requests that the generators have, and their mean over time."""

    def __init__(self) -> None:
        self.requests = 0
        self._began = self._changed = math.nan
        self._request_seconds = 0.0

    def add(self, requests: int) -> None:
        """Count more requests, or fewer."""
        now = asyncio.get_running_loop().time()
        if math.isnan(self._began):
            self._began = self._changed = now
        self._request_seconds += self.requests * (now - self._changed)
        self._changed = now
        self.requests += requests

    def mean(self) -> float:
        """Return the mean since the last call."""
        self.add(0)
        mean = self._request_seconds / max(self._changed - self._began, 1e-9)
        self._began, self._request_seconds = self._changed, 0.0
        return mean


def _shown(error: Exception) -> str:
    """Return the error in one line, with the place in the user's code where it was raised."""
    place = user_place(error)
    return f"{error!r} ({place})" if place else repr(error)


def _portable(error: Exception) -> Exception:
    """Return the error, or where it cannot be sent to another process its text, notes and traceback: a class with
    arguments of its own is pickled, and cannot be read."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # noqa: BLE001 - user code: anything may go wrong in it
        failure = RuntimeError(f"{type(error).__name__}: {error}")
        for note in (*getattr(error, "__notes__", ()), "".join(traceback.format_exception(error))):
            failure.add_note(note)
        return failure
