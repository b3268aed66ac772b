"""Runs code that a model wrote: a pool of warm workers at the best level that the host allows.

namespaces   a process without the host's users, files, network and processes, with seccomp and limits: code can use
             the standard library and files in a folder of its own
seccomp      a process that can only compute, with limits: code can use the modules that are loaded before
interpreter  pydantic-monty: a subset of Python

Invariant: a call ends within its time, and nothing that it started is left; what it did is not seen by another call.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import json
import logging
import os
import queue
import select
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Literal

from rollout.plugins import python_path
from rollout.processes import end_group, start_worker
from rollout.sandbox.worker import CALL, ENDED


class Interpreter:
    """A pool of monty's workers. Raises ImportError or OSError where it is not installed."""

    def __init__(self, *, num_workers: int) -> None:
        import pydantic_monty

        self._monty = pydantic_monty
        self._pool = pydantic_monty.Monty(min_processes=num_workers, max_processes=num_workers)
        self._pool.__enter__()

    def run(self, code: str, *, seconds: float, memory_bytes: int, output_chars: int) -> tuple[str, str]:
        """Return (output, status) of code, as Sandbox.run does."""
        printed: list[str] = []
        room = output_chars

        def keep(_: object, text: str) -> None:
            nonlocal room
            if room > 0:
                printed.append(text[:room])
                room -= len(text)

        limits = self._monty.ResourceLimits(
            max_feed_duration_secs=seconds, max_memory=memory_bytes, max_total_sleep_secs=seconds
        )
        status = "ok"
        try:
            with self._pool.checkout(limits=limits) as session:
                value = session.feed_run(code, print_callback=keep)
            if value is not None:
                keep("stdout", f"{value!r}\n")
        except self._monty.MontyCrashedError as error:
            status = "crashed"
            keep("stderr", f"{error}\n")
        except self._monty.MontyError as error:
            status = "timeout" if str(error).startswith("TimeoutError: feed time limit") else "error"
            keep("stderr", f"{error}\n")
        return "".join(printed), status

    def close(self) -> None:
        """End the workers."""
        self._pool.__exit__(None, None, None)


logger = logging.getLogger(__name__)

Level = Literal["namespaces", "seccomp", "interpreter"]
LEVELS: tuple[Level, ...] = ("namespaces", "seccomp", "interpreter")
"""From the one in which most code runs."""
Status = Literal["ok", "error", "timeout", "crashed"]
_START_SECONDS = 60.0
_GRACE_SECONDS = 30.0
"""A worker that has not answered this long after the time of a call is replaced."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SandboxError(RuntimeError):
    """The host allows no level of the sandbox, or not the one that was asked for."""


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """What code may use."""

    level: str = "auto"
    """One of LEVELS; auto: the first that the host allows."""
    seconds: float = 5.0
    """Time limit of a call."""
    memory_mib: int = 256
    output_chars: int = 10_000
    """What is printed beyond is cut; four times as many bytes are an error."""
    modules: tuple[str, ...] = ()
    """Installed modules that code may import, such as numpy; they are loaded once. Not at the level interpreter."""
    num_workers: int = 2
    """Calls at the same time."""

    @property
    def output_bytes(self) -> int:
        """What is read of the output."""
        return 4 * self.output_chars


@dataclass(frozen=True)
class Ran:
    """What came of code."""

    output: str
    """What it printed, the value of a last expression, and the traceback of an error."""
    status: Status
    """error: it raised, or exited with another code than 0; crashed: a signal ended it."""


class Sandbox:
    """A pool of workers, which start with the first call. Calls from several threads are made at the same time."""

    def __init__(self, settings: SandboxSettings | None = None) -> None:
        self._settings = settings or SandboxSettings()
        if self._settings.level not in ("auto", *LEVELS):
            raise SandboxError(f"sandbox level {self._settings.level!r}: use auto or one of {', '.join(LEVELS)}")
        self._lock = threading.Lock()
        self._level: Level | None = None
        self._interpreter: Interpreter | None = None
        self._free: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()  # None: to be started
        self._workers: set[_Worker] = set()
        self._threads = ThreadPoolExecutor(self._settings.num_workers, thread_name_prefix="sandbox")

    @property
    def level(self) -> Level:
        """The level in force. Raises SandboxError where the host allows none."""
        with self._lock:
            if self._level is None:
                self._level = self._start()
                logger.info("sandbox: level %s", self._level)
            return self._level

    def run(self, code: str, input: str = "") -> Ran:
        """Run code in a fresh state and return what came of it. `input`: what it reads from standard input (not at the
        level interpreter). Raises SandboxError."""
        if self.level == "interpreter":
            assert self._interpreter is not None, "it is started with the level"
            settings = self._settings
            output, status = self._interpreter.run(
                code, seconds=settings.seconds, memory_bytes=settings.memory_mib * 2**20,
                output_chars=settings.output_chars,
            )  # fmt: skip
            return Ran(output, status)  # type: ignore[arg-type] # one of Status
        worker = self._free.get()
        try:
            if worker is None or worker.has_ended():
                worker = self._started(self.level)
            return worker.run(code, input, self._settings)
        finally:
            self._free.put(worker)

    async def run_async(self, code: str, input: str = "") -> Ran:
        """Run code as run() does, without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.run, code, input)

    def close(self) -> None:
        """End the workers and what runs in them."""
        for worker in list(self._workers):
            worker.end()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._interpreter is not None:
            self._interpreter.close()

    def _start(self) -> Level:
        """Start at the first level that works."""
        wanted = LEVELS if self._settings.level == "auto" else (self._settings.level,)
        reasons = []
        for level in wanted:
            try:
                if level == "interpreter":
                    self._interpreter = Interpreter(num_workers=self._settings.num_workers)
                else:
                    self._free.put(self._started(level))
                    for _ in range(self._settings.num_workers - 1):
                        self._free.put(None)
            except (ImportError, OSError) as error:
                reasons.append(f"{level}: {error}")
            else:
                return level  # type: ignore[return-value] # checked by the constructor
        raise SandboxError(
            f"the host does not allow the sandbox ({'; '.join(reasons)}); pip install 'slipstream[sandbox]' brings the "
            "level interpreter"
        )

    def _started(self, level: str) -> _Worker:
        worker = _Worker(level, self._settings.modules)
        self._workers = {one for one in self._workers if not one.is_lost} | {worker}
        return worker


class _Worker:
    """A process that takes one call at a time. Raises OSError where the host does not allow its level."""

    def __init__(self, level: str, modules: tuple[str, ...]) -> None:
        self.is_lost = False
        path = python_path(*(f for f in sys.path if "site-packages" in f and modules))
        env = {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._channel, self._process = start_worker(
            "rollout.sandbox.worker", level, json.dumps(modules), env=env, flags=("-S", "-P"),
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self._channel.settimeout(_START_SECONDS)
        said = b""
        while not said.endswith(b"\n") and (more := self._channel.recv(4096)):
            said += more
        if said != b"ready\n":
            self.end()
            raise OSError(said.decode(errors="replace").strip() or "its process ended at the start")

    def run(self, code: str, input: str, settings: SandboxSettings) -> Ran:
        """Run code in a child of the worker."""
        source = code.encode(errors="replace")
        readable, writable = os.pipe()
        given = os.memfd_create("code", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        try:
            os.pwrite(given, source + input.encode(errors="replace"), 0)
            fcntl.fcntl(given, fcntl.F_ADD_SEALS, _SEALS)
            call = CALL.pack(settings.seconds, settings.memory_mib * 2**20, len(source))
            socket.send_fds(self._channel, [call], [given, writable])
        except OSError:
            self.end()
        finally:
            os.close(given)
            os.close(writable)
        deadline = time.monotonic() + settings.seconds + _GRACE_SECONDS
        try:
            output = _read_output(readable, settings.output_bytes, deadline)
        finally:
            os.close(readable)
        return self._outcome(output, settings, deadline)

    def _outcome(self, output: bytes, settings: SandboxSettings, deadline: float) -> Ran:
        try:
            self._channel.settimeout(max(deadline - time.monotonic(), 0.1))
            code, late = ENDED.unpack(self._channel.recv(ENDED.size, socket.MSG_WAITALL))
        except Exception as error:  # noqa: BLE001 - a worker that does not answer, or ended: it is replaced
            self.end()
            code, late = -9, isinstance(error, TimeoutError)
        text = output.decode(errors="replace")
        if len(text) > settings.output_chars:
            text = text[: settings.output_chars] + "\n[output cut]\n"
        if len(output) > settings.output_bytes:  # whether it ended before or after nobody read on is chance
            return Ran(text, "error")
        if late:
            return Ran(f"{text}TimeoutError: more than {settings.seconds:g} s\n", "timeout")
        if code < 0:
            return Ran(f"{text}ended by signal {-code}\n", "crashed")
        return Ran(text, "error" if code else "ok")

    def has_ended(self) -> bool:
        """Return whether it can take no call; it may have been killed while it had none."""
        if self._process.poll() is not None:
            self.end()
        return self.is_lost

    def end(self) -> None:
        """Kill the process with its children."""
        if not self.is_lost:
            self.is_lost = True
            self._channel.close()
            end_group(self._process)


def _read_output(fd: int, limit: int, deadline: float) -> bytes:
    """Return what comes until the end, at most `limit` bytes."""
    parts = bytearray()
    while len(parts) <= limit and select.select([fd], [], [], max(deadline - time.monotonic(), 0))[0]:
        if not (part := os.read(fd, 65536)):
            break
        parts += part
    return bytes(parts)


@cache
def _shared(settings: SandboxSettings) -> Sandbox:
    sandbox = Sandbox(settings)
    atexit.register(sandbox.close)
    return sandbox


def run_python(code: str, input: str = "", *, seconds: float = 5.0, memory_mib: int = 256) -> Ran:
    """Run code in the sandbox of this process, for rewards that judge programs. Raises SandboxError."""
    return _shared(SandboxSettings(seconds=seconds, memory_mib=memory_mib, num_workers=1)).run(code, input)
