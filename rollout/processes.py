"""Processes that end with another one, and groups of processes that end as one. Standard library only."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
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


def start_worker(
    module: str, *words: str, env: Mapping[str, str], flags: Sequence[str] = ("-P",), stdout: int | None = None
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start `python -m module FD words...` as the leader of a process group, with the other end of the returned socket
    at the file descriptor FD. Ctrl-C does not reach it, and end_group() reaches what it has started."""
    own, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *flags, "-m", module, str(theirs.fileno()), *words],
            env=env, stdin=subprocess.DEVNULL, stdout=stdout, pass_fds=[theirs.fileno()], start_new_session=True,
        )  # fmt: skip
    return own, process


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
