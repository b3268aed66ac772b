"""Signals that the process of the user gets and its driver handles."""

from __future__ import annotations

import math
import os
import signal
import time
from contextlib import AbstractContextManager, suppress
from types import FrameType

from core.processes.signals import SIGNALS, handle


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
