"""Ctrl-C and SIGTERM while a command still imports its modules and checks its input.

An exception would be a traceback out of whatever is being imported, and code that catches everything could swallow it.
Invariant: nothing has been written or started, so the process ends where it is. From then on until the run handles
signals itself they raise KeyboardInterrupt.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130
"""Exit code of a command that a signal has ended."""
NOTHING_STARTED = "Interrupted. Nothing was started."

_ending = False
_is_command = False


def end_at_signals() -> None:
    """Let SIGINT and SIGTERM end this process with INTERRUPTED and one line on stderr, until `raise_at_signals`."""
    global _ending, _is_command
    _ending = _is_command = True
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)


def raise_at_signals() -> None:
    """Let both raise KeyboardInterrupt, if `end_at_signals` was called; also SIGINT in a process that a shell started
    in the background, which ignored it before."""
    global _ending
    if _ending:
        _ending = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)


def is_command() -> bool:
    """Return whether this process runs a command, not a program of a user that calls this package."""
    return _is_command


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, f"{NOTHING_STARTED}\n".encode())
    os._exit(INTERRUPTED)
