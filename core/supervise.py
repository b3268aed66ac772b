"""The attempts of a run: each is a process of its own, and another one follows when one is lost.

The process that the user started forks before it has imported torch or Ray; the child is the driver of one attempt, and
tells through a pipe how far it got. When it is gone, and everything that it started with it, the next one begins from
the newest recover checkpoint.
Invariant: two attempts never live at the same time, and an attempt never outlives the process that the user started.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import psutil

logger = logging.getLogger(__name__)

DONE, FAILED, BAD_INPUT, GAVE_UP, INTERRUPTED = 0, 1, 2, 3, 130
EXIT_CODES = {
    DONE: "training is complete",
    FAILED: "the run failed, and another attempt would too: bad data, a full disk; or recover_mode is not auto",
    BAD_INPUT: "bad input: nothing was started",
    GAVE_UP: "recover_mode=auto: more than recover_retries attempts in a row were lost without progress",
    INTERRUPTED: "interrupted by Ctrl-C or SIGTERM",
}
"""Of `python -m core.quickstart`."""

_END_SECONDS = 30.0
"""For the processes of a lost attempt to go by themselves (its guard ends them); then they are killed."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass
class Attempt:
    """One life of all processes, and what it tells about itself."""

    number: int = 1
    memory: dict[str, Any] = field(default_factory=dict)
    """What earlier attempts learnt about memory; see core/memory.py."""
    pipe: int | None = None
    began: int = 0
    """Steps that were finished when it began."""
    step: int = 0
    """Steps that are finished."""
    cause: str = ""
    final: bool = False
    """It ended for a reason that another attempt would meet as well."""
    seconds: float = 0.0

    def tell(self, **facts: object) -> None:
        """Set attributes here, and where the attempt is supervised."""
        for name, value in facts.items():
            setattr(self, name, value)
        if self.pipe is not None:
            with suppress(BrokenPipeError):
                os.write(self.pipe, json.dumps(facts).encode() + b"\n")

    def __str__(self) -> str:
        return (
            f"attempt {self.number}: began with {self.began} steps done, reached {self.step}, "
            f"{self.seconds:.1f} s: {self.cause}"
        )


def run_attempts(run: Callable[[Attempt], int], *, retries: int) -> int:
    """Call `run(attempt)`, in processes of their own, until one ends well or in a way that is final: its exit code.

    An attempt that began no further than the one before counts as one without progress; after `retries` restarts
    without progress the run ends with a summary of all attempts. `retries` 0: one call, in this process.
    """
    if retries == 0:
        return run(Attempt())
    attempts: list[Attempt] = []
    without_progress = 0
    _adopt_orphans()
    while True:
        attempt = Attempt(number=len(attempts) + 1, memory=attempts[-1].memory if attempts else {})
        code = _in_child(run, attempt)
        if code is None:
            return run(attempt)
        attempts.append(attempt)
        if code in (DONE, INTERRUPTED) or attempt.final:
            if len(attempts) > 1:
                logger.info("This run took %d attempts:\n%s", len(attempts), _table(attempts))
            return code
        progress = len(attempts) > 1 and attempt.began > attempts[-2].began
        without_progress = 1 if progress else without_progress + 1
        if without_progress > retries:
            logger.error(
                "Giving up: %d attempts in a row without progress (recover_retries=%d):\n%s",
                without_progress, retries, _table(attempts),
            )  # fmt: skip
            return GAVE_UP
        logger.error(
            "Attempt %d was lost after step %d: %s. Restarting from the last recover checkpoint (%d of %d).",
            attempt.number, attempt.step, attempt.cause, without_progress, retries,
        )  # fmt: skip


def _table(attempts: list[Attempt]) -> str:
    return "\n".join(f"  {attempt}" for attempt in attempts)


def _in_child(run: Callable[[Attempt], int], attempt: Attempt) -> int | None:
    """Fork. In the child: None, and `attempt` tells its parent. In the parent: the child's exit code, once it and all
    that it started are gone; `attempt` is filled in."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    reading, attempt.pipe = os.pipe()
    begin, parent = time.monotonic(), os.getpid()
    with _Forwarding() as forwarding:
        child = os.fork()
        if child == 0:
            forwarding.restore()
            os.close(reading)
            os.setpgid(0, 0)  # Ctrl-C comes from the parent, once
            _die_with(parent)
            return None
        forwarding.to(child)
        os.close(attempt.pipe)
        attempt.pipe = None
        with os.fdopen(reading, "rb") as pipe:
            status = _listen(pipe.fileno(), child, attempt)
    attempt.seconds = time.monotonic() - begin
    _end_orphans()
    if forwarding.came and not attempt.final:  # it came before the attempt was ready for it
        attempt.tell(final=True, cause="interrupted")
        return INTERRUPTED
    if os.WIFSIGNALED(status):
        attempt.cause = f"the driver was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    elif not attempt.cause and os.WEXITSTATUS(status) == DONE:
        attempt.cause = "done"
    elif not attempt.cause:
        attempt.cause = f"the driver ended without a word (exit code {os.WEXITSTATUS(status)}), as when its Ray dies"
    return os.waitstatus_to_exitcode(status)


def _listen(pipe: int, child: int, attempt: Attempt) -> int:
    """Take in what the attempt tells until it has ended: its status."""
    rest = b""
    status: int | None = None
    while True:
        ready = select.select([pipe], [], [], 0.2 if status is None else 0.0)[0]
        data = os.read(pipe, 65536) if ready else b""
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            for name, value in json.loads(line).items():
                setattr(attempt, name, value)
        if status is not None and not data:
            return status
        if status is None:
            if ready and not data:
                time.sleep(0.05)  # its end of the pipe is closed: it is about to go
            with suppress(ChildProcessError):
                while (found := os.waitpid(-1, os.WNOHANG))[0]:
                    status = found[1] if found[0] == child else status


class _Forwarding(AbstractContextManager["_Forwarding"]):
    """SIGINT and SIGTERM go to the child, which ends in order; also those that come before there is one."""

    def __enter__(self) -> _Forwarding:
        self._child: int | None = None
        self._numbers: list[int] = []
        self._before: dict[int, Any] = {s: signal.signal(s, self._forward) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.restore()

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def came(self) -> bool:
        """Whether there was one."""
        return bool(self._numbers)

    def to(self, child: int) -> None:
        """The process that they go to from now on, and those that came already."""
        self._child = child
        for number in self._numbers:
            os.kill(child, number)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._numbers.append(number)
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.kill(self._child, number)


def _adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process (Linux), so that none is lost from sight."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _die_with(parent: int) -> None:
    """End this process when its parent has ended (Linux; elsewhere the parent's own end is Ctrl-C or SIGTERM)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(FAILED)


def _end_orphans() -> None:
    """Return when nothing is left of the attempt."""
    deadline = time.monotonic() + _END_SECONDS
    while left := psutil.Process().children(recursive=True):
        if time.monotonic() > deadline:
            for process in left:
                logger.warning("Killing what an attempt left behind: process %d", process.pid)
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)
