"""Scores completions in worker processes: between the workflow and whatever a reward function does with an answer.

RewardPools has one pool for each reward of a run, as task sets may be judged in different ways. A run in which most
completions cannot be scored ends, as their rewards do not depend on the answers.

Invariant: every answer handed in gets exactly one score within about the time limit of the answers before it on its
worker, whatever the reward function does: an answer that hangs, crashes, exhausts memory or raises scores WRONG and is
counted. No worker outlives its pool, nor the process of its pool.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import pickle
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rollout.plugins import user_frame
from rollout.processes import end_group, start_worker
from rollout.rewards.config import RewardConfig
from rollout.rewards.load import QUICK_REWARDS, check_names
from rollout.rewards.math import WRONG
from rollout.rewards.worker import LENGTH, RESULT, Outcome
from rollout.time_limit import not_counted
from rollout.types import Prompt, Score
from tracing import span

logger = logging.getLogger(__name__)

_MAX_BATCH = 16
"""Answers sent to a worker at once: enough to hide the pipe, few enough to wait behind one that hangs."""
_UNDIVIDED_SECONDS = 0.01
"""Waiting answers that one worker judges in this time go to it together: another message costs more than it saves."""
_MAX_QUICK_BATCH = 64
"""Most answers of such a message; _MAX_BATCH once an answer has hung or crashed its worker."""
_KILL_GRACE_SECONDS = 0.5
"""A worker ends slow Python code by itself at the limit, which spares its restart; this much later it is killed."""
_START_TIMEOUT_SECONDS = 120.0
_MAX_LOGGED_ERRORS = 3
_READ_BYTES = 2**16


class RewardWorkerError(RuntimeError):
    """A worker could not be started; the message contains its output."""


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    prompt: Prompt
    text: str
    score: asyncio.Future[tuple[float, Outcome]]


class RewardPool:
    """Worker processes around one reward function. Use as `async with`, or start() and close().

    start() must be called from a thread that runs as long as the pool: Linux ends the workers with that thread.
    """

    def __init__(
        self, reward: str, *, num_workers: int = 2, timeout_seconds: float = 5.0, memory_limit_gib: float = 4.0
    ) -> None:
        """`reward`: a spec of rollout/rewards/load.py, a name in REWARDS or an import path "pkg.mod:fn" for example.

        `timeout_seconds` is per answer; `memory_limit_gib` is what a worker may take on top of its imports.
        """
        check_names(reward)
        if num_workers < 1 or timeout_seconds <= 0 or memory_limit_gib <= 0:
            raise ValueError(
                f"num_workers={num_workers}, timeout_seconds={timeout_seconds}, memory_limit_gib={memory_limit_gib}: "
                "all must be greater than 0"
            )
        self._reward = reward
        self._quick = QUICK_REWARDS.get(reward)
        self._num_workers = num_workers
        self._timeout_seconds = timeout_seconds
        self._memory_limit_bytes = int(memory_limit_gib * 2**30)
        self._waiting: asyncio.Queue[_Answer] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._workers: set[_Worker] = set()
        self._answer_seconds = math.inf
        """What an answer of the last batch took."""
        self._outcomes: Counter[Outcome] = Counter()
        self.last_error = "none"
        """Why a completion could not be scored, in one line."""
        self._error: BaseException | None = None

    async def __aenter__(self) -> RewardPool:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the workers; return once each has loaded the reward function. RewardWorkerError if one cannot."""
        starting = [asyncio.create_task(self._start_worker()) for _ in range(self._num_workers)]
        try:
            workers = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.wait(starting)
            await self.close()
            raise
        self._tasks = [asyncio.create_task(self._serve(worker)) for worker in workers]
        for serving in self._tasks:
            serving.add_done_callback(self._on_serve_end)

    async def close(self) -> None:
        """End the workers. Scores still awaited are cancelled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        for worker in list(self._workers):
            self._end(worker)
        self._error = RuntimeError("the reward pool is closed")
        _give_up(self._drain(), asyncio.CancelledError())

    async def score(self, prompt: Prompt, text: str) -> float:
        """Return the reward of one completion; WRONG when it could not be scored."""
        return (await self.score_many(prompt, [text]))[0]

    async def score_many(self, prompt: Prompt, texts: Sequence[str]) -> list[float]:
        """Return the rewards of several completions of one prompt, in order."""
        return [score for score, _ in await self.judge_many(prompt, texts)]

    async def judge_many(self, prompt: Prompt, texts: Sequence[str]) -> list[tuple[float, Outcome]]:
        """Score completions as score_many, and return how scoring each one ended."""
        if self._error is not None:
            raise self._error
        assert self._tasks, "start() comes before score()"
        scores = [self._quick(prompt, text) if self._quick else None for text in texts]
        pending = {i: self._send(prompt, texts[i]) for i, score in enumerate(scores) if score is None}
        self._outcomes[Outcome.SCORED] += len(texts) - len(pending)
        with not_counted():
            await asyncio.gather(*pending.values())
        return [pending[i].result() if score is None else (score, Outcome.SCORED) for i, score in enumerate(scores)]

    def _send(self, prompt: Prompt, text: str) -> asyncio.Future[tuple[float, Outcome]]:
        answer = _Answer(prompt, text, asyncio.get_running_loop().create_future())
        self._waiting.put_nowait(answer)
        return answer.score

    def stats(self) -> dict[str, float]:
        """Return the answers since the start by outcome, and how many wait."""
        counts = {f"reward/num_{outcome.name.lower()}": float(self._outcomes[outcome]) for outcome in Outcome}
        return counts | {"reward/num_waiting": float(self._waiting.qsize())}

    async def _serve(self, worker: _Worker) -> None:
        """Send waiting answers to one worker, and replace it when an answer hangs or crashes it."""
        while True:
            batch = await self._next_batch()
            try:
                with span("judge", lane="rewards", answers=len(batch)):
                    begin = time.perf_counter()
                    lost = await self._score_batch(worker, batch)
                    if batch:
                        self._answer_seconds = (time.perf_counter() - begin) / len(batch)
            except BaseException as error:
                _give_up(batch, error)
                raise
            if lost is not None:
                for answer in lost:
                    self._waiting.put_nowait(answer)
                worker = await self._start_worker()

    def _on_serve_end(self, task: asyncio.Task[None]) -> None:
        """Pass the error to everything that waits for a score, now or later: a worker cannot be replaced."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._error = error
        _give_up(self._drain(), error)

    def _drain(self) -> list[_Answer]:
        return [self._waiting.get_nowait() for _ in range(self._waiting.qsize())]

    async def _next_batch(self) -> list[_Answer]:
        """Wait for an answer, then take this worker's share of those that wait."""
        batch = [await self._waiting.get()]
        size = batch_size(
            self._waiting.qsize() + 1,
            num_workers=self._num_workers,
            answer_seconds=self._answer_seconds,
            has_hung=bool(self._outcomes[Outcome.TIMEOUT] or self._outcomes[Outcome.CRASH]),
        )
        while len(batch) < size:
            batch.append(self._waiting.get_nowait())
        return [answer for answer in batch if not answer.score.done()]  # the others were cancelled by their callers

    async def _score_batch(self, worker: _Worker, batch: list[_Answer]) -> list[_Answer] | None:
        """Score `batch` in order. Returns None when the worker can continue; otherwise it is ended, and the unscored
        answers are returned."""
        worker.send([(answer.prompt, answer.text) for answer in batch])
        left = list(batch)
        while left:
            try:
                async with asyncio.timeout(self._timeout_seconds + _KILL_GRACE_SECONDS):
                    results = await worker.receive()
            except TimeoutError:
                self._end(worker)
                self._resolve(left[0], WRONG, Outcome.TIMEOUT)
                return left[1:]
            except (asyncio.IncompleteReadError, ConnectionError):
                self._resolve(left[0], WRONG, Outcome.CRASH, f"the worker exited: {self._end(worker)}")
                return left[1:]
            for answer, result in zip(left, results, strict=False):
                self._resolve(answer, *result)
            left = left[len(results) :]
        return None

    def _resolve(self, answer: _Answer, score: float, outcome: Outcome, message: str = "") -> None:
        self._outcomes[outcome] += 1
        if outcome is Outcome.SCORED and message:
            score, message = Score(score, json.loads(message)), ""
        if not outcome.is_verdict:
            place = user_frame(message)
            self.last_error = message.strip().rpartition("\n")[2] or outcome.name.lower()
            self.last_error += f" ({place})" if place else ""
        if message and self._outcomes[Outcome.ERROR] + self._outcomes[Outcome.CRASH] <= _MAX_LOGGED_ERRORS:
            logger.warning(
                "reward %s: a completion of %s counts as wrong: %s\n%s", self._reward, answer.prompt.query_id,
                self.last_error, message,
            )  # fmt: skip
        if not answer.score.done():
            answer.score.set_result((score, outcome))

    async def _start_worker(self) -> _Worker:
        worker = _Worker(self._reward, timeout_seconds=self._timeout_seconds, memory_bytes=self._memory_limit_bytes)
        self._workers.add(worker)
        try:
            await worker.connect()
            async with asyncio.timeout(_START_TIMEOUT_SECONDS):
                (_, outcome, message), *_ = await worker.receive()
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            raise RewardWorkerError(f"a worker of reward {self._reward} did not start: {self._end(worker)}") from error
        if outcome is not Outcome.SCORED:
            raise RewardWorkerError(f"reward {self._reward} cannot be loaded:\n{message}")
        return worker

    def _end(self, worker: _Worker) -> str:
        self._workers.discard(worker)
        return worker.kill()


def batch_size(num_waiting: int, *, num_workers: int, answer_seconds: float, has_hung: bool) -> int:
    """Return how many of the waiting answers a free worker takes: its share, or all that are judged in
    _UNDIVIDED_SECONDS."""
    undivided = int(_UNDIVIDED_SECONDS / answer_seconds)
    share = num_waiting if num_waiting <= undivided else math.ceil(num_waiting / num_workers)
    return min(share, _MAX_BATCH if has_hung else max(_MAX_BATCH, min(undivided, _MAX_QUICK_BATCH)))


def _give_up(answers: list[_Answer], error: BaseException) -> None:
    for answer in answers:
        if isinstance(error, asyncio.CancelledError):
            answer.score.cancel()
        elif not answer.score.done():
            answer.score.set_exception(error)


class _Worker:
    """A worker process and this end of its socket."""

    def __init__(self, reward: str, *, timeout_seconds: float, memory_bytes: int) -> None:
        self._writer: asyncio.StreamWriter | None = None
        self._received = bytearray()
        import_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        words = [reward, str(timeout_seconds), str(memory_bytes), str(os.getpid())]
        env = os.environ | {"PYTHONPATH": import_path, "OMP_NUM_THREADS": "1"}
        self._socket, self._process = start_worker("rollout.rewards.worker", *words, env=env)

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)

    def send(self, batch: list[tuple[Prompt, str]]) -> None:
        assert self._writer is not None, "connect() comes first"
        payload = pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL)
        self._writer.write(LENGTH.pack(len(payload)) + payload)

    async def receive(self) -> list[tuple[float, Outcome, str]]:
        """Return the results that have arrived, at least one, in order. Raises IncompleteReadError or ConnectionError
        when the process has ended."""
        while not (results := self._complete_results()):
            arrived = await self._reader.read(_READ_BYTES)
            if not arrived:
                raise asyncio.IncompleteReadError(bytes(self._received), None)
            self._received += arrived
        return results

    def _complete_results(self) -> list[tuple[float, Outcome, str]]:
        """Take the results of which every byte has arrived."""
        results, begin = [], 0
        while (text := begin + RESULT.size) <= len(self._received):
            score, outcome, length = RESULT.unpack_from(self._received, begin)
            if text + length > len(self._received):
                break
            begin = text + length
            results.append((score, Outcome(outcome), self._received[text:begin].decode()))
        del self._received[:begin]
        return results

    def kill(self) -> str:
        """End the process and what it started; how it ended, in words."""
        code = end_group(self._process)
        if self._writer is not None:
            self._writer.close()
        self._socket.close()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


_PREFIX = "reward/num_"
_FAILURES = ("error", "memory", "timeout", "crash")
_SCORED = ("scored", "unparsable")


class RewardPools:
    """Reward pools by spec. start() and close() as those of a pool."""

    def __init__(self, specs: Collection[str], config: RewardConfig) -> None:
        self._pools = {
            spec: RewardPool(spec, num_workers=config.num_workers, timeout_seconds=config.timeout_seconds)
            for spec in sorted(specs)
        }

    def of(self, spec: str) -> RewardPool:
        """Return the pool of a reward."""
        return self._pools[spec]

    async def start(self) -> None:
        """Start the workers. Raises RewardWorkerError."""
        for pool in self._pools.values():
            await pool.start()

    async def close(self) -> None:
        """End the workers."""
        for pool in self._pools.values():
            await pool.close()

    @property
    def last_error(self) -> str:
        """Why a completion could not be scored, in one line."""
        found = [pool.last_error for pool in self._pools.values()]
        return next((error for error in found if error != "none"), "none")

    def stats(self) -> dict[str, float]:
        """Return the sums of the pools' figures."""
        total: Counter[str] = Counter()
        for pool in self._pools.values():
            total.update(pool.stats())
        return dict(total)


class RewardFailureError(ValueError):
    """Most completions of several batches in a row could not be scored; another attempt would not score them either."""


class FailedScores:
    """Compares the counts of a reward pool from batch to batch."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._before: dict[str, float] = {}
        self._in_a_row = 0

    def check(self, stats: Mapping[str, float], *, step: int, last_error: str) -> float:
        """Return the share of the completions since the last call that could not be scored; log a warning when that
        are too many. `stats`: of the reward pool, since its start. Raises RewardFailureError."""
        counts = {name: stats.get(_PREFIX + name, 0.0) for name in (*_FAILURES, *_SCORED)}
        new = {name: count - self._before.get(name, 0.0) for name, count in counts.items()}
        self._before = counts
        failed, total = sum(new[name] for name in _FAILURES), sum(new.values())
        share = failed / total if total else 0.0
        if share <= self._config.max_failed_share:
            self._in_a_row = 0
            return share
        self._in_a_row += 1
        reasons = ", ".join(f"{new[name]:.0f} {name}" for name in _FAILURES if new[name])
        message = f"step {step}: {failed:.0f} of {total:.0f} completions could not be scored ({reasons}) "
        message += "and count as wrong (-1)"
        logger.warning("%s. The last error: %s", message, last_error)
        if self._in_a_row >= self._config.max_failed_batches:
            raise RewardFailureError(
                f"reward.function: {message}, as in the {self._in_a_row} steps up to here (reward.max_failed_share="
                f"{self._config.max_failed_share:g}, reward.max_failed_batches={self._config.max_failed_batches}). "
                f"The last error: {last_error}"
            )
        return share
