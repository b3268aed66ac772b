"""The attempts of a run: each is a process of its own, and another one follows when one is lost.

The process that the user started forks before it has imported torch or Ray; the child is the driver of one attempt, and
reports its progress through a pipe. When it is gone, and everything that it started with it, the next one begins from
the newest recover checkpoint. Signals are forwarded to the driver. A driver that was stopped, or whose interpreter
hangs, sends no heartbeat, and is killed for that, as is one that does not end after a signal. Invariant: two attempts
never run at the same time, and an attempt never outlives the process that the user started.
"""

import json
import logging
import math
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self

import psutil

from core.errors import could_not_write
from core.processes.signals import INTERRUPTED, SIGNALS, Interrupts, begin_shutdown, handle, is_command
from core.processes.stacks import FOLDER, collect_stacks, register_process
from core.processes.watchdog import make_temporary, use_temporary
from rollout.processes import adopt_orphans, die_with

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

    def __enter__(self) -> Self:
        self.child: int | None = None
        """Gets the signals."""
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
                self.child = child
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
        if self.child is not None:
            with suppress(ProcessLookupError):
                os.kill(self.child, number)


class Watch:
    """Kills a driver without heartbeats; sooner after a signal. Only time in which this process itself ran counts: no
    timeout runs while the whole machine or its container is suspended."""

    def __init__(
        self, child: int, forwarding: Forwarding, *, driver_seconds: float, end_seconds: float, log_folder: Path
    ) -> None:
        """`driver_seconds`: most without a heartbeat. `end_seconds`: most after the first signal."""
        self._child, self._forwarding, self._log_folder = child, forwarding, log_folder
        self._driver_seconds, self._end_seconds = driver_seconds, end_seconds
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
        limit = min(self._driver_seconds, END_SECONDS) if self._forwarding.came else self._driver_seconds
        late = self._forwarding.seconds_since > self._end_seconds
        if self.verdict or (self._elapsed <= limit and not late):
            return
        if self._elapsed > limit:
            verb, reason = "sent", f"no heartbeat for {self._elapsed:.0f} s in phase {phase!r}"
            key = f" (deadlines.driver_seconds={self._driver_seconds:g})"
        else:
            verb, reason = "had", f"not ended {self._end_seconds:.0f} s after a signal, in phase {phase!r}"
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


DONE, FAILED, BAD_INPUT, GAVE_UP = 0, 1, 2, 3
EXIT_CODES = {
    DONE: "training is complete",
    FAILED: "the run failed, and another attempt would too: bad data, a workflow that keeps failing, a full disk; or "
    "recover_mode is not auto",
    BAD_INPUT: "bad input: nothing was started",
    GAVE_UP: "recover_mode=auto: more than recover_retries consecutive attempts failed without progress",
    INTERRUPTED: "interrupted by Ctrl-C, SIGTERM, SIGHUP or SIGUSR1",
}
"""Of `python -m core.quickstart`."""

_HEARTBEAT_SECONDS = 1.0
"""Between two heartbeats of a driver."""


@dataclass
class Attempt:
    """One execution of all processes, and its reports."""

    number: int = 1
    memory: dict[str, float] = field(default_factory=dict)
    """Memory limits of earlier attempts; see core/train/recover.py."""
    pipe: int | None = None
    began: int = 0
    """Steps that were finished when it began."""
    step: int = 0
    """Steps that are finished."""
    phase: str = "starting"
    """What the driver does, or did last."""
    cause: str = ""
    final: bool = False
    """It ended for a reason that another attempt would meet as well."""
    done: bool = False
    """Training is complete, and everything saved."""
    silent: bool = False
    """Its process ended without a message of its own."""
    seconds: float = 0.0

    def report(self, **facts: object) -> None:
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


def run_attempts(
    run: Callable[[Attempt], int],
    *,
    retries: int,
    driver_seconds: float,
    log_folder: Path,
    end_seconds: float,
    interrupted: Callable[[Attempt], int] = lambda attempt: INTERRUPTED,
    more_follow: bool = False,
) -> int:
    """Call `run(attempt)`, in processes of their own, until one ends well or in a way that is final: its exit code.

    An attempt that began no further than the one before counts as one without progress; after `retries` restarts
    without progress the run ends with a summary of all attempts. A driver that sent no heartbeat for
    `driver_seconds` (deadlines.driver_seconds) writes its stacks below `log_folder` and is killed; so is one that
    still runs `end_seconds` after a signal. `retries` 0: one attempt, whose exit code is returned.
    `interrupted(attempt)`: in place of `run`, for a Ctrl-C that comes before `run` can handle it. `more_follow`: this
    process runs something else after it.
    """
    with Forwarding() as forwarding:  # also between two attempts, where a signal must not end this process alone
        watch = partial(
            Watch, forwarding=forwarding, driver_seconds=driver_seconds, end_seconds=end_seconds, log_folder=log_folder
        )
        driver = partial(_run_as_driver, run, interrupted, log_folder, forwarding)
        code = _supervise(driver, retries, watch, forwarding)
        if is_command() and not more_follow:
            forwarding.ignore()  # the exit code is known: another Ctrl-C must not change it
        return code


def _supervise(
    driver: Callable[[Attempt], NoReturn], retries: int, watch: Callable[[int], Watch], forwarding: Forwarding
) -> int:
    """Run `driver(attempt)` in one process after the other. `watch(child)`: what kills it where it hangs."""
    attempts: list[Attempt] = []
    without_progress = 0
    adopt_orphans()
    others = psutil.Process().children()
    while True:
        attempt = Attempt(number=len(attempts) + 1, memory=attempts[-1].memory if attempts else {})
        code = _in_child(attempt, watch, forwarding, others)
        if code is None:
            driver(attempt)
        attempts.append(attempt)
        if code in (DONE, INTERRUPTED) or attempt.final:
            if len(attempts) > 1:
                logger.info("This run took %d attempts:\n%s", len(attempts), _table(attempts))
            return code
        if retries == 0:
            if attempt.silent:
                logger.error("The run failed after step %d: %s.", attempt.step, attempt.cause)
            return max(code, FAILED)
        progress = len(attempts) > 1 and attempt.began > attempts[-2].began
        without_progress = 1 if progress else without_progress + 1
        if without_progress > retries:
            logger.error(
                "Giving up: %d consecutive attempts without progress (recover_retries=%d):\n%s",
                without_progress, retries, _table(attempts),
            )  # fmt: skip
            return GAVE_UP
        logger.error(
            "Attempt %d failed after step %d: %s. Restarting from the last recover checkpoint (%d of %d).",
            attempt.number, attempt.step, attempt.cause, without_progress, retries,
        )  # fmt: skip


def _run_as_driver(
    run: Callable[[Attempt], int],
    interrupted: Callable[[Attempt], int],
    log_folder: Path,
    forwarding: Forwarding,
    attempt: Attempt,
) -> NoReturn:
    """Run an attempt in this process and end it: what follows in the caller is for the process that the user
    started."""
    code = FAILED
    Interrupts().__enter__()  # until this process ends: a signal must not change how it does
    try:
        try:
            forwarding.unblock()  # a signal that is lost in the imports is found by what waits later
            code = _drive(run, attempt, log_folder)
        finally:
            begin_shutdown()
        if code == DONE:
            attempt.report(done=True)
    except KeyboardInterrupt:
        code = interrupted(attempt)
    raise SystemExit(code)


def _drive(run: Callable[[Attempt], int], attempt: Attempt, log_folder: Path) -> int:
    """Run an attempt in this process, its driver."""
    try:
        register_process(DRIVER, log_folder)
        if not has_working_folder():  # removed since the start: libraries do not load then
            os.chdir(log_folder)
            logger.warning("The working folder was removed; this attempt works in %s.", log_folder)
    except OSError as error:
        cause = could_not_write("the log of the driver", log_folder, error)
        logger.error("%s", cause)
        attempt.report(final=True, cause=str(cause))
        return FAILED
    threading.Thread(target=_send_heartbeats, args=(attempt,), name="heartbeat", daemon=True).start()
    return run(attempt)


def has_working_folder() -> bool:
    """Return whether the working folder of this process still exists."""
    with suppress(FileNotFoundError):
        return bool(os.getcwd())
    return False


def _table(attempts: list[Attempt]) -> str:
    return "\n".join(f"  {attempt}" for attempt in attempts)


def _send_heartbeats(attempt: Attempt) -> None:
    """Send heartbeats from a thread of the driver, which needs its interpreter."""
    while True:
        time.sleep(_HEARTBEAT_SECONDS)
        attempt.report()


def _in_child(
    attempt: Attempt, watch: Callable[[int], Watch], forwarding: Forwarding, others: Collection[psutil.Process]
) -> int | None:
    """Fork. In the child: None, and `attempt` reports to its parent. In the parent: the child's exit code, once it and
    all that it started are gone; `attempt` is filled in. `others`: children that are not the run's."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    reading, attempt.pipe = os.pipe()
    temporary = make_temporary()
    begin, parent = time.monotonic(), os.getpid()
    child = forwarding.fork()
    if child == 0:
        os.close(reading)
        os.setpgid(0, 0)  # Ctrl-C comes from the parent, once
        die_with(parent)
        use_temporary(temporary)
        return None
    os.close(attempt.pipe)
    attempt.pipe = None
    with os.fdopen(reading, "rb") as pipe:
        watched = watch(child)
        status = _listen(pipe.fileno(), child, attempt, watched)
    forwarding.child = None  # its number may be another process's by now
    attempt.seconds = time.monotonic() - begin
    end_orphans(others)
    shutil.rmtree(temporary, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    killed = ""
    if os.WIFSIGNALED(status) or (
        watched.verdict and code != DONE
    ):  # a driver that is woken may end before it is killed
        killed = watched.verdict or f"the driver was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    if attempt.done:
        # The interpreter ends without the handlers of signals, so that one may have killed it.
        ended = killed or (f"the driver exited with code {code}" if code != DONE else "")
        if ended and not forwarding.came:
            logger.warning("After the end of training, %s.", ended)
        attempt.cause = "done"
        return DONE
    if forwarding.came and not attempt.final:  # it came before the attempt was ready for it
        attempt.report(final=True, cause="interrupted")
        return INTERRUPTED
    attempt.silent = bool(killed) or not attempt.cause
    if killed:
        attempt.cause = f"{attempt.cause}; then {killed}" if attempt.cause else killed
        if attempt.final:  # it had reported its end, and hung in its exit
            return INTERRUPTED if forwarding.came else FAILED
    elif code == DONE:  # as by sys.exit(0) in a library
        code = FAILED
        attempt.cause = attempt.cause or "the driver exited with code 0 before training was complete"
    elif not attempt.cause:
        attempt.cause = f"the driver exited without a message (exit code {code}), as when Ray fails"
    return code


def _listen(pipe: int, child: int, attempt: Attempt, watch: Watch) -> int:
    """Receive the reports of the attempt until it has ended; return its status."""
    rest = b""
    status: int | None = None
    while True:
        ready = select.select([pipe], [], [], 0.2 if status is None else 0.0)[0]
        data = os.read(pipe, 65536) if ready else b""
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            for name, value in json.loads(line).items():
                # A stopped driver runs again while it writes its stacks: deadlines that have passed are not the cause.
                if not watch.verdict or name not in ("cause", "final"):
                    setattr(attempt, name, value)
        if status is not None and not data:
            return status
        if status is None:
            watch.look(attempt.phase, heartbeat=bool(data))
            if ready and not data:
                time.sleep(0.05)  # its end of the pipe is closed: it is about to go
            with suppress(ChildProcessError):
                while (found := os.waitpid(-1, os.WNOHANG))[0]:
                    status = found[1] if found[0] == child else status
