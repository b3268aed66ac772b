"""Ctrl-C and SIGTERM end a run in order, whatever its driver is doing.

Python turns a signal into an exception wherever the main thread happens to be. In a destructor, or in a callback out of
Ray's own code, that exception is printed and lost. Invariant: a signal is therefore remembered as well, and everything
that waits for workers asks for it.
"""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

_received: int | None = None


class Interrupts(AbstractContextManager["Interrupts"]):
    """While entered, SIGINT and SIGTERM raise KeyboardInterrupt in the main thread and are remembered."""

    def __enter__(self) -> Interrupts:
        self._before: dict[int, Any] = {s: signal.signal(s, _interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc_info: object) -> None:
        global _received
        for number, handler in self._before.items():
            signal.signal(number, handler)
        _received = None


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if a signal came since Interrupts was entered."""
    if _received is not None:
        raise KeyboardInterrupt(f"signal {_received}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _received
    _received = number
    raise KeyboardInterrupt(f"signal {number}")
