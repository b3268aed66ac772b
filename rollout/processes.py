"""Processes that end with another one, and groups of processes that end as one. Standard library only."""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the thread of `parent` that started it ends (Linux). End it now if that
    has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process (Linux), so that all of them are found."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_group(process: subprocess.Popen[bytes], *, grace_seconds: float = 0.0) -> int:
    """End the process group that `process` leads and return its exit code. With `grace_seconds`, send SIGTERM and wait
    that long for the leader before SIGKILL ends what is left."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if grace_seconds:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(grace_seconds)
    with suppress(ProcessLookupError):  # children that outlive the leader keep its group
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
