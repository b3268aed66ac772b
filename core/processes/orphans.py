"""Processes of an attempt whose parent has ended, and the end of an attempt with the process that the user started."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection
from contextlib import suppress

import psutil

logger = logging.getLogger(__name__)

END_SECONDS = 30.0
"""For the processes of a lost attempt to go by themselves (its watchdog ends them); then they are killed."""


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
