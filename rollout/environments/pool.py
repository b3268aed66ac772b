"""Environments in worker processes, with a time limit for each call.

Invariant: a call ends with a result or an error within its limit, whatever the environment does. A worker that hangs or
ends is replaced; the environment that was called is named, and the others that the worker held are lost with it, or
restored from their snapshots.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import pickle
from collections.abc import Mapping
from typing import Any

from rollout.environments.worker import LENGTH, Result
from rollout.journal import current_journal
from rollout.plugins import python_path
from rollout.processes import end_group, start_worker


class EnvironmentFailure(RuntimeError):  # noqa: N818 - named as the metric that counts it
    """An environment raised, took too long, or was lost with its worker."""


class EnvironmentLostError(EnvironmentFailure):
    """An environment was lost with its worker, which has ended; what it was asked need not be the reason."""


class EnvironmentPool:
    """Workers that hold environments of one kind. They start with the first environment and end with close()."""

    def __init__(self, spec: str, *, num_workers: int, setup_seconds: float, step_seconds: float) -> None:
        """`spec`: see make_environment(). `setup_seconds`: for reset(), which may import libraries."""
        self._spec, self._num_workers = spec, num_workers
        self.seconds = {
            "reset": setup_seconds, "restore": setup_seconds, "step": step_seconds, "close": step_seconds,
        }  # fmt: skip
        self._workers: list[_Worker] = []
        self._numbers = itertools.count()

    def open(self, name: str = "") -> RemoteEnvironment:
        """Return an environment. `name`: within the episode; environments of one name are counted."""
        return RemoteEnvironment(self, next(self._numbers), name)

    def worker(self) -> _Worker:
        """Return the worker that holds the fewest environments."""
        self._workers = [worker for worker in self._workers if not worker.is_lost]
        if len(self._workers) < self._num_workers:
            self._workers.append(_Worker(self._spec))
        return min(self._workers, key=lambda worker: worker.num_held)

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.end()


class RemoteEnvironment:
    """An environment in a worker. Use as `async with`.

    One with snapshots records in the journal of the episode the result of each step, and the newest snapshot. Run
    again, it answers from there, and is restored where something new is asked."""

    def __init__(self, pool: EnvironmentPool, number: int, name: str) -> None:
        self._pool, self._number, self._name, self._seconds = pool, number, name, pool.seconds
        self._worker = pool.worker()
        self._worker.num_held += 1
        self._is_live = False
        self._num_taken = 0  # of the recorded steps
        self._first = ""
        self._steps: list[tuple[str, str, float, bool]] = []  # action, observation, reward, over
        self._state: bytes | None = None

    async def reset(self, row: Mapping[str, object], seed: int) -> str:
        """See Environment.reset(). Raises EnvironmentFailure."""
        self._start = dict(row), seed
        self._asked = hashlib.blake2b(repr(self._start).encode(), digest_size=16).hexdigest()
        self._journal = current_journal()
        self._place = "" if self._journal is None else self._journal.place_of(f"environment {self._name}")
        known = self._known("")
        if known is None:
            await self._begin()
        else:
            num_steps, self._state = known
            (self._first,) = self._known(", reset")
            self._steps = [self._known(f", step {i}") for i in range(num_steps)]
        return self._first

    async def step(self, action: str) -> tuple[str, float, bool]:
        """See Environment.step(). Raises EnvironmentFailure."""
        if self._num_taken < len(self._steps):
            known, observation, reward, done = self._steps[self._num_taken]
            if known == action:
                self._num_taken += 1
                return observation, reward, done
            again = [step[0] for step in self._steps[: self._num_taken]]
            await self._begin()
            for earlier in again:
                await self._step(earlier)
        elif self._state is not None and (not self._is_live or self._worker.is_lost):
            self._move()
            self._is_live = True
            await self._call("restore", self._state)
        return await self._step(action)

    async def _begin(self) -> None:
        self._is_live, self._steps, self._num_taken = True, [], 0
        self._first, _, _, self._state = await self._call("reset", *self._start)
        self._record(", reset", (self._first,))

    async def _step(self, action: str) -> tuple[str, float, bool]:
        observation, reward, done, self._state = await self._call("step", action)
        self._steps.append((action, observation, reward, done))
        self._record(f", step {self._num_taken}", self._steps[-1])
        self._num_taken += 1
        return observation, reward, done

    def _known(self, what: str) -> Any:
        return None if self._journal is None else self._journal.known(self._place + what, self._asked)

    def _record(self, what: str, result: tuple[object, ...]) -> None:
        """Record a result, and with it the number of steps so far and the snapshot after them."""
        if self._journal is not None and self._state is not None:
            state = len(self._steps), self._state
            self._journal.record(self._asked, {self._place + what: result, self._place: state})

    def _move(self) -> None:
        """Leave a worker that is lost."""
        if self._worker.is_lost:
            self._worker.num_held -= 1
            self._worker = self._pool.worker()
            self._worker.num_held += 1

    async def __aenter__(self) -> RemoteEnvironment:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._worker.num_held -= 1
        if self._is_live and not self._worker.is_lost:
            self._worker.begin(self._number, "close", (), seconds=self._seconds["close"])  # it is over in any case

    async def _call(self, method: str, *arguments: object) -> tuple[str, float, bool, bytes | None]:
        # A caller that is cancelled leaves the call to its end: others have environments in this worker, too.
        call = self._worker.begin(self._number, method, arguments, seconds=self._seconds[method])
        return await asyncio.shield(call) or ("", 0.0, False, None)


class _Worker:
    """A process, which takes one call at a time."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self.num_held = 0
        self.is_lost = False
        self._turn = asyncio.Lock()
        self._channel, self._process = start_worker(
            "rollout.environments.worker", spec, str(os.getpid()), env=os.environ | {"PYTHONPATH": python_path()}
        )
        self._channel.setblocking(False)

    def begin(self, number: int, method: str, arguments: tuple[object, ...], *, seconds: float) -> asyncio.Task[Result]:
        """Begin to call a method of an environment. The task raises EnvironmentFailure."""
        task = asyncio.create_task(self._call(number, method, arguments, seconds=seconds))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # a caller may be gone
        return task

    async def _call(self, number: int, method: str, arguments: tuple[object, ...], *, seconds: float) -> Result:
        async with self._turn:
            if self.is_lost:
                raise EnvironmentLostError(
                    f"environment {self._spec}: lost, as another one ended or blocked its worker"
                )
            try:
                async with asyncio.timeout(seconds):
                    result, error = await self._exchange(number, method, arguments)
            except TimeoutError:
                self.end()
                raise EnvironmentFailure(
                    f"environment {self._spec}: {method}() took more than {seconds:g} s; its process is replaced"
                ) from None
            except (OSError, EOFError):
                self.end()
                code = self._process.returncode
                raise EnvironmentLostError(
                    f"environment {self._spec}: its process ended in {method}(), exit code {code}; it is replaced"
                ) from None
            if error is not None:
                last = error.strip().rpartition("\n")[2]
                raise EnvironmentFailure(f"environment {self._spec}: {method}() failed: {last}\n{error}")
            return result

    async def _exchange(self, number: int, method: str, arguments: tuple[object, ...]) -> tuple[Result, str | None]:
        loop = asyncio.get_running_loop()
        message = pickle.dumps((number, method, arguments))
        await loop.sock_sendall(self._channel, LENGTH.pack(len(message)) + message)
        [length] = LENGTH.unpack(await self._read(LENGTH.size))
        answer: tuple[Result, str | None] = pickle.loads(await self._read(length))
        return answer

    async def _read(self, size: int) -> bytes:
        loop, parts = asyncio.get_running_loop(), bytearray()
        while len(parts) < size:
            part = await loop.sock_recv(self._channel, size - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def end(self) -> None:
        """Kill the process with its children."""
        if not self.is_lost:
            self.is_lost = True
            self._channel.close()
            end_group(self._process)
