"""A driver as seen from the process of the user: the signals that it is sent, its timeouts, and the end of what it has
started. It is killed without heartbeats, or where it does not end after a signal."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from core.processes.signals import SIGNALS, handle
from core.processes.stacks import FOLDER, collect_stacks

logger = logging.getLogger(__name__)

END_SECONDS = 30.0
"""For the processes of a lost attempt to go by themselves (its watchdog ends them); then they are killed."""
DRIVER = "driver"
"""Name of its stacks."""
_LONGEST_LOOK_SECONDS = 1.0
"""What counts of the time between two looks at a driver; where it was more, this process did not run itself."""


class Forwarding(AbstractContextManager["Forwarding"]):
    """Signals go to the child, which ends in order; also those that come before there is one, or between two of them:
    the next one gets them at once. To be entered in the main thread."""

    def __enter__(self) -> Forwarding:
        self._child: int | None = None
        self._numbers: list[int] = []
        self._first = math.inf
        self._before = handle(self._forward)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Put the handlers back, once."""
        while self._before:
            signal.signal(*self._before.popitem())

    def ignore(self) -> None:
        """Ignore all of them until this process ends, also when its interpreter has taken its own handlers away. Only
        for a process that has nothing else to do."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        self._before.clear()

    def forget_child(self) -> None:
        """Send no more signals to a child that has ended: its number may be another process's by now."""
        self._child = None

    @property
    def came(self) -> bool:
        """True if there was one."""
        return bool(self._numbers)

    @property
    def seconds_since(self) -> float:
        """Seconds since the first one; negative without one."""
        return time.monotonic() - self._first

    def fork(self) -> int:
        """Call os.fork(): the signals go to the child from now on, those that came already included. They are
        blocked until the child has its own handlers, in which it calls unblock(): in those that it inherits a signal
        would be lost."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        child = -1
        try:
            child = os.fork()
            if child == 0:
                if self._before.get(signal.SIGINT) is signal.SIG_IGN:
                    # So a shell starts jobs in the background. The parent takes the signal, and so must its child;
                    # ignoring it here would also discard one that waits for the mask.
                    self._before[signal.SIGINT] = signal.default_int_handler
                self.restore()
            else:
                self._child = child
                for number in self._numbers:
                    os.kill(child, number)
        finally:
            if child != 0:
                self.unblock()
        return child

    def unblock(self) -> None:
        """Let the signals through that fork() has blocked."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._first = min(self._first, time.monotonic())
        if self._numbers and number != signal.SIGINT:  # repeated: ray.shutdown() takes away the driver's handler
            return
        self._numbers.append(number)
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.kill(self._child, number)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """After which a driver is killed."""

    driver_seconds: float
    """Without a heartbeat."""
    end_seconds: float
    """After the first signal."""


class Watch:
    """Kills a driver without heartbeats; sooner after a signal. Only time in which this process itself ran counts: no
    timeout runs while the whole machine or its container is suspended."""

    def __init__(self, child: int, limits: Limits, log_folder: Path, forwarding: Forwarding) -> None:
        self._child, self._limits, self._log_folder, self._forwarding = child, limits, log_folder, forwarding
        self._elapsed = 0.0
        """Seconds since the last heartbeat."""
        self._looked = time.monotonic()
        self.verdict = ""
        """Why it was killed."""

    def look(self, phase: str, *, heartbeat: bool) -> None:
        """Check the driver several times a second; `heartbeat`: it has sent one since the last call."""
        now = time.monotonic()
        self._elapsed = 0.0 if heartbeat else self._elapsed + min(now - self._looked, _LONGEST_LOOK_SECONDS)
        self._looked = now
        limit = self._limits.driver_seconds
        limit = min(limit, END_SECONDS) if self._forwarding.came else limit
        late = self._forwarding.seconds_since > self._limits.end_seconds
        if self.verdict or (self._elapsed <= limit and not late):
            return
        if self._elapsed > limit:
            verb, reason = "sent", f"no heartbeat for {self._elapsed:.0f} s in phase {phase!r}"
            key = f" (deadlines.driver_seconds={self._limits.driver_seconds:g})"
        else:
            verb, reason = "had", f"not ended {self._limits.end_seconds:.0f} s after a signal, in phase {phase!r}"
            key = " (twice deadlines.interrupt_seconds, and 30 s to end)"
        state = "running"
        with suppress(OSError):  # a full disk; the driver is killed all the same
            state = collect_stacks(self._log_folder, [DRIVER], why=reason).get(DRIVER, state)
        where = self._log_folder / FOLDER
        self.verdict = f"the driver ({state}) {verb} {reason}{key} and was killed; its stacks are in {where}"
        logger.error("%s", self.verdict)  # now: a process that waits for a device may stay for long
        os.kill(self._child, signal.SIGKILL)


def end_orphans(others: Collection[psutil.Process]) -> None:
    """Return when all children but `others` have ended, with their descendants: nothing is left of the attempt."""
    deadline = time.monotonic() + END_SECONDS
    while left := [process for child in psutil.Process().children() if child not in others for process in _tree(child)]:
        if time.monotonic() > deadline:
            for process in left:
                logger.warning("Killing process %d, left over from an attempt", process.pid)
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


def _tree(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and its descendants; it alone where it has just ended."""
    with suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return [process]
