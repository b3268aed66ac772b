"""Processes of an attempt whose parent has ended, and the end of an attempt with the process that the user started."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress

import psutil

logger = logging.getLogger(__name__)

END_SECONDS = 30.0
"""For the processes of a lost attempt to go by themselves (its watchdog ends them); then they are killed."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> list[psutil.Process]:
    """Make descendants whose parent ends children of this process (Linux), so that all of them are found. Return the
    children that it has now: those of a script that starts a run, not the run's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return psutil.Process().children()


def die_with(parent: int) -> None:
    """End this process when its parent has ended (Linux; elsewhere the parent's own end is Ctrl-C or SIGTERM)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


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
