"""Ctrl-C and SIGTERM while a command still imports its modules and checks its input.

An exception would be a traceback out of whatever is being imported, and code that catches everything could swallow it.
Invariant: nothing has been written or started, so the process ends where it is.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

INTERRUPTED = 130
"""Exit code of a command that a signal has ended."""
NOTHING_STARTED = "Interrupted. Nothing was started."

_before: dict[int, Any] = {}
"""Handlers by signal, while `end_at_signals` holds."""


def end_at_signals() -> None:
    """Let SIGINT and SIGTERM end this process with INTERRUPTED and one line on stderr, until `leave_signals`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        _before[number] = signal.signal(number, _end)


def leave_signals() -> None:
    """Put the handlers back that were there before `end_at_signals`, if it was called."""
    while _before:
        signal.signal(*_before.popitem())


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, f"{NOTHING_STARTED}\n".encode())
    os._exit(INTERRUPTED)
