"""Keeps the generators busy: starts prompts as far ahead of the trainer as max_staleness allows.

One asyncio task per prompt. A prompt is started where that becomes possible: on entry, in set_version(), and when
a request of another prompt ends; there is no loop to wake up. All calls belong to the thread of the event loop.
Invariant: every prompt of the stream is started in order and handed to the trainer exactly once, or dropped and counted
(dynamic sampling, a workflow that keeps failing), over failures and restarts. How old it may be then is bounded by
admission and selection (rollout/experience/).
"""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rollout.data.prompts import PromptDataset
from rollout.data.source import DatasetError
from rollout.errors import ErrorPolicy
from rollout.experience import Experience, Group
from rollout.ledger import Entry, PromptLedger, from_plain, to_plain
from rollout.plugins import user_place
from rollout.trajectory_checks import GroupLimits, check_group
from rollout.types import Generator, Prompt, Workflow
from rollout.workflow_calls import as_failure, outcome_of

logger = logging.getLogger(__name__)


class RolloutProducer:
    """Prompts in, batches of finished groups out. `async with` starts the first prompts and cancels the last.

    The trainer's part, for step i = 0, 1, ...: groups = await take(i), train, push the weights, set_version(i + 1).
    take(i + 1) may begin when step i is trained, before the push.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        workflow: Workflow,
        generator: Generator,
        experience: Experience,
        *,
        max_in_flight: int | None = None,
        group_size: int = 1,
        max_retries: int = 3,
        limits: GroupLimits | None = None,
        errors: ErrorPolicy | None = None,
        stats_sources: Sequence[Callable[[], Mapping[str, float]]] = (),
    ) -> None:
        """`experience`: decides which prompts start and which finished groups a step gets (make_experience).

        While the generators have fewer requests than `max_in_flight`, prompts are started, each of which counts as
        `group_size` requests until it has sent more or ended that many; best a little more than what the generators run
        at once, as what only queues there ages for nothing. A workflow that raises is run again `max_retries` times,
        with the same seeds; then `errors` decides: the prompt is dropped, or take() raises. None: it raises.
        `limits`: what else than `group_size` a group must keep. `stats_sources` are added to stats(): a reward pool's,
        a router's.
        """
        for name, value, least in (
            ("max_in_flight", max_in_flight, 1), ("group_size", group_size, 1), ("max_retries", max_retries, 0),
        ):  # fmt: skip
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        self._schedule, self._admission, self._store = experience.schedule, experience.admission, experience.store
        self._dataset = dataset
        self._workflow = workflow
        self._generator = generator
        self._settings = experience.settings
        self._max_in_flight = max_in_flight
        self._group_size = group_size
        self._load = _Load()  # of all prompts
        self._max_retries = max_retries
        self._limits = replace(limits or GroupLimits(), group_size=group_size)
        self._errors = errors or ErrorPolicy(on_error="fail")
        self._stats_sources = (dataset.stats, *stats_sources)
        self._version = 0
        self._again: deque[int] = deque()  # positions in flight at the checkpoint this run started from
        self._known: dict[int, list[Entry]] = {}  # what they had
        self._ledgers: dict[int, PromptLedger] = {}  # by position, of the prompts that run
        self._tasks: set[asyncio.Task[None]] = set()
        self._failing: set[asyncio.Task[None]] = set()
        self._running = False
        self._counts = {"num_prompts": 0, "num_trajectories": 0, "num_tokens": 0, "num_failures": 0, "num_skipped": 0}

    async def __aenter__(self) -> RolloutProducer:
        self._running = True
        self._start_prompts()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._running = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def take(self, version: int) -> list[Group]:
        """Return the groups that step `version` trains on, oldest first; waits until they are there.

        Raises WorkflowFailureError where the workflow kept failing, or the error of a generator or a reward worker.
        """
        return await self._store.select(version)

    def set_version(self, version: int) -> None:
        """Acknowledge the steps before `version`, and start the prompts that its weights allow."""
        if version < self._version:
            raise ValueError(f"set_version({version}): the weights are at version {self._version} already")
        self._version = version
        self._store.acknowledge(version)
        self._start_prompts()

    def stats(self) -> dict[str, float]:
        """Return the metrics: counts since the start, sizes now, waits and ages of the last batch, and the share of
        max_in_flight that the generators had on average since the last call."""
        stats = {f"rollout/{name}": float(value) for name, value in self._counts.items()}
        stats |= {"rollout/num_in_flight": float(len(self._tasks)), "rollout/version": float(self._version)}
        if self._max_in_flight is not None:
            stats["rollout/generators_busy"] = min(1.0, self._load.mean() / self._max_in_flight)
        stats |= self._store.stats()
        for source in self._stats_sources:
            stats |= source()
        return stats

    @property
    def taken(self) -> list[int]:
        """Positions in the stream of the prompts that the last take() handed out, in its order."""
        return self._store.taken

    async def state_dict(self) -> dict[str, Any]:
        """Return plain types and numpy arrays, with the batch that was taken last unless set_version() has acknowledged
        it. Not to be called between take(i + 1) and set_version(i + 1)."""
        partial = await self._generator.partial()
        # From here on nothing is awaited: store, cursor and ledgers are of one moment.
        entries = self._known | {position: ledger.entries(partial) for position, ledger in self._ledgers.items()}
        return {
            "settings": dict(self._settings),
            "dataset": self._dataset.state_dict(),
            "buffer": self._store.state_dict(),
            "in_flight": {
                position: [to_plain(entry) for entry in entries.get(position, ())]
                for position in self._store.in_flight()
            },
            "version": self._version,
            "counts": dict(self._counts),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], *, keep_sampled: bool = True, ignore_changes: bool = False
    ) -> None:
        """Continue where `state` was taken; call before `async with`. Requests that were in flight continue with their
        tokens, first; without `keep_sampled`, it and what was finished are sampled once more.

        Raises ValueError where settings or data set are others; with `ignore_changes`, begins at the version's step
        with nothing sampled instead."""
        assert not self._running, "load_state_dict() comes before `async with`"
        try:
            self._check_settings(state["settings"])
            self._dataset.load_state_dict(state["dataset"])
        except (ValueError, DatasetError) as change:
            if not ignore_changes:
                raise
            self.begin_at(state["version"], reason=str(change))
            return
        self._store.load_state_dict(state["buffer"], keep_ready=keep_sampled)
        self._again = deque(self._store.in_flight())
        if keep_sampled:
            self._known = {position: [from_plain(p) for p in plain] for position, plain in state["in_flight"].items()}
        self._version = state["version"]
        self._counts |= state["counts"]

    def begin_at(self, step: int, *, reason: str) -> None:
        """Begin with the prompts of `step`, nothing of which is sampled."""
        self._version = step
        self._store.skip_to(step)
        position = self._schedule.consumed_before(step)
        self._dataset.seek(position)
        logger.warning("%s. Finished and running completions are dropped; continuing at prompt %d.", reason, position)

    def _check_settings(self, saved: Mapping[str, Any]) -> None:
        for name, before in saved.items():
            if before != self._settings[name]:
                raise ValueError(
                    f"{name}={self._settings[name]}, but the recover checkpoint was written with {before}: set it "
                    "back, allow the change with recover_ignore_changes=true, or start afresh with "
                    "recover_mode=disabled"
                )

    def _start_prompts(self) -> None:
        while self._running and (self._max_in_flight is None or self._load.requests < self._max_in_flight):
            if self._again:
                position = self._again.popleft()
                prompt = self._dataset.at(position)
            else:
                position = self._dataset.position
                if not self._admission.may_start(position - self._store.num_dropped, self._version):
                    return
                prompt = self._dataset.next()
                self._store.start(position, self._version)
                logger.debug("prompt %d (%s) is admitted at version %d", position, prompt.query_id, self._version)
            ledger = self._open_ledger(position)
            task = asyncio.create_task(self._run_prompt(position, prompt, ledger))
            self._tasks.add(task)
            task.add_done_callback(partial(self._on_task_end, position))

    def _open_ledger(self, position: int) -> PromptLedger:
        known = self._known.pop(position, ())
        ledger = PromptLedger(self._generator, known, num_expected=self._group_size, on_change=self._on_load)
        self._ledgers[position] = ledger
        self._load.add(ledger.load)
        return ledger

    def _on_load(self, difference: int) -> None:
        self._load.add(difference)
        self._start_prompts()

    async def _run_prompt(self, position: int, prompt: Prompt, ledger: PromptLedger) -> None:
        """Run the workflow until it succeeds once; end with put() or, out of retries, with drop() or fail()."""
        for attempt in range(1, self._max_retries + 2):
            outcome = await outcome_of(partial(self._sample, prompt, ledger), fatal=self._errors.always_fatal)
            if isinstance(outcome, Exception):
                self._counts["num_failures"] += 1
                logger.warning(
                    "%s: attempt %d of %d failed: %s", prompt.query_id, attempt, self._max_retries + 1, _shown(outcome)
                )
                if attempt > self._max_retries:
                    await self._give_up(position, prompt, outcome)
                    return
                failed, ledger = ledger, self._open_ledger(position)
                failed.end()
                await self._store.restart(position, self._version)
            else:
                self._errors.count(failed=False)
                self._counts["num_prompts"] += 1
                self._counts["num_trajectories"] += len(outcome)
                self._counts["num_tokens"] += sum(int(t.loss_mask.sum()) for t in outcome)
                logger.debug("prompt %d has %d finished trajectories", position, len(outcome))
                await self._store.put(position, outcome)
                del self._ledgers[position]
                ledger.end()
                self._start_prompts()  # a dropped group makes room
                return

    async def _sample(self, prompt: Prompt, ledger: PromptLedger) -> Group:
        answer = await self._workflow.run(prompt, ledger)
        # Tokens of a version that is pushed, and not yet announced to the producer, are no mistake.
        return check_group(answer, prompt, version=self._version + 1, limits=self._limits)

    def _on_task_end(self, position: int, task: asyncio.Task[None]) -> None:
        """Fail the rollout when the task of a prompt has ended in any other way than _run_prompt has planned: otherwise
        its step would wait for the prompt forever."""
        self._tasks.discard(task)
        if task.cancelled():
            if not self._running:
                return
            error: BaseException = RuntimeError("the task of a prompt was cancelled from outside of the producer")
        elif (raised := task.exception()) is None:
            return
        else:
            error = raised
        self._running = False
        failure = as_failure(error)
        failure.add_note(f"the task of prompt {position} of the stream ended unexpectedly")
        logger.error("prompt %d: its task ended unexpectedly: %s", position, _shown(failure), exc_info=failure)
        failing = asyncio.get_running_loop().create_task(self._store.fail(_portable(failure)))
        self._failing.add(failing)  # the event loop alone would let it be collected
        failing.add_done_callback(self._failing.discard)

    async def _give_up(self, position: int, prompt: Prompt, error: Exception) -> None:
        """Drop a prompt whose workflow kept failing, or end the run with its error."""
        error.add_note(f"sampling prompt {prompt.query_id} of epoch {prompt.epoch}, attempt {self._max_retries + 1}, "
                       "the last")  # fmt: skip
        self._errors.count(failed=True)
        if failure := self._errors.ends_run(error, runs=self._max_retries + 1):
            self._running = False
            await self._store.fail(_portable(failure))
            return
        self._counts["num_skipped"] += 1
        logger.warning(
            "%s: skipped after %d attempts (workflow.on_error=skip; %d prompts so far): %s", prompt.query_id,
            self._max_retries + 1, self._counts["num_skipped"], _shown(error),
        )  # fmt: skip
        await self._store.drop(position)
        self._ledgers.pop(position).end()
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
