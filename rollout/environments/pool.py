"""Environments in worker processes, with a time limit for each call.

Invariant: a call ends with a result or an error within its limit, whatever the environment does. A worker that hangs or
ends is replaced; the environment that was called is named, and the others that the worker held are lost with it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Mapping

from rollout.environments.worker import LENGTH, Result
from rollout.plugins import python_path
from rollout.processes import end_group


class EnvironmentFailure(RuntimeError):  # noqa: N818 - named as the metric that counts it
    """An environment raised, took too long, or was lost with its worker."""


class EnvironmentPool:
    """Workers that hold environments of one kind. They start with the first environment and end with close()."""

    def __init__(self, spec: str, *, num_workers: int, setup_seconds: float, step_seconds: float) -> None:
        """`spec`: see make_environment(). `setup_seconds`: for reset(), which may import libraries."""
        self._spec, self._num_workers = spec, num_workers
        self.seconds = {"reset": setup_seconds, "step": step_seconds, "close": step_seconds}
        self._workers: list[_Worker] = []
        self._numbers = itertools.count()

    def open(self) -> RemoteEnvironment:
        """Return an environment in the worker that holds the fewest."""
        self._workers = [worker for worker in self._workers if not worker.is_lost]
        if len(self._workers) < self._num_workers:
            self._workers.append(_Worker(self._spec))
        worker = min(self._workers, key=lambda worker: worker.num_held)
        return RemoteEnvironment(worker, next(self._numbers), self.seconds)

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.end()


class RemoteEnvironment:
    """An environment in a worker. Use as `async with`."""

    def __init__(self, worker: _Worker, number: int, seconds: Mapping[str, float]) -> None:
        self._worker, self._number, self._seconds = worker, number, seconds
        worker.num_held += 1

    async def reset(self, row: Mapping[str, object], seed: int) -> str:
        """See Environment.reset(). Raises EnvironmentFailure."""
        return str(await self._call("reset", dict(row), seed))

    async def step(self, action: str) -> tuple[str, float, bool]:
        """See Environment.step(). Raises EnvironmentFailure."""
        result = await self._call("step", action)
        assert isinstance(result, tuple), "the worker returns what step() does"
        return result

    async def __aenter__(self) -> RemoteEnvironment:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._worker.num_held -= 1
        if not self._worker.is_lost:
            self._worker.begin(self._number, "close", (), seconds=self._seconds["close"])  # it is over in any case

    async def _call(self, method: str, *arguments: object) -> Result:
        # A caller that is cancelled leaves the call to its end: others have environments in this worker, too.
        return await asyncio.shield(self._worker.begin(self._number, method, arguments, seconds=self._seconds[method]))


class _Worker:
    """A process, which takes one call at a time."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self.num_held = 0
        self.is_lost = False
        self._turn = asyncio.Lock()
        own, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-P",
            "-m",
            "rollout.environments.worker",
            str(theirs.fileno()),
            spec,
            str(os.getpid()),
        ]
        env = os.environ | {"PYTHONPATH": python_path()}
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()
        own.setblocking(False)
        self._channel = own

    def begin(self, number: int, method: str, arguments: tuple[object, ...], *, seconds: float) -> asyncio.Task[Result]:
        """Begin to call a method of an environment. The task raises EnvironmentFailure."""
        task = asyncio.create_task(self._call(number, method, arguments, seconds=seconds))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # a caller may be gone
        return task

    async def _call(self, number: int, method: str, arguments: tuple[object, ...], *, seconds: float) -> Result:
        async with self._turn:
            if self.is_lost:
                raise EnvironmentFailure(f"environment {self._spec}: lost, as another one ended or blocked its worker")
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
                raise EnvironmentFailure(
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
