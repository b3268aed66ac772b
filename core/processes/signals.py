"""Signals end a run in order, whatever its driver is doing.

Until the modules of a command are imported and its input is checked, a signal ends the process where it is: nothing has
been written or started. Later Python turns a signal into an exception wherever the main thread happens to be. In a
destructor, or in a callback out of Ray's own code, that exception is lost. Invariant: a signal is therefore remembered
as well, and everything that waits for workers asks for it.

Only the first signal raises KeyboardInterrupt, and later ones never interrupt what saves: batch systems and process
managers repeat theirs. A later Ctrl-C raises EndNow. A step that has begun is finished first, so that its state can be
saved: see `postponed`. A process that shuts down already is not interrupted: see `begin_shutdown`.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Self

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C, the end that a batch system orders, a closed terminal, and the warning of Slurm before its time limit."""
INTERRUPTED = 130
"""Exit code of a command that a signal has ended."""
NOTHING_STARTED = "Interrupted. Nothing was started."

_SAME_SECONDS = 1.0
"""Signals that follow one another within this time count as one: `timeout` sends its signal to a command and to its
process group."""
_SHUTDOWN_SECONDS = 10.0
"""Duration of a shutdown, or of a part of it, after which a signal interrupts it."""

_is_command = _ending = False
_received: list[tuple[int, float]] = []
"""Number and time (time.monotonic) of each signal since Interrupts was entered."""
_seconds: float | None = None
"""That the innermost `postponed` block leaves after the first signal; None: outside of one."""
_began = 0.0
"""When that block began."""
_logged = False
_shutdown_began: float | None = None
"""time.monotonic() at the last begin_shutdown() since Interrupts was entered; None without one."""

Handler = Callable[[int, FrameType | None], object]


class EndNow(KeyboardInterrupt):
    """A second Ctrl-C, a signal whose time to finish is over, or one while a shutdown hangs: what runs is not in a
    state to be saved."""


def handle(handler: Handler) -> dict[int, Handler | int | None]:
    """Install a handler of SIGNALS and return those before. SIGHUP and SIGUSR1 stay ignored where the caller's parent
    ignores them, as `nohup` does."""
    ignored = [n for n in (signal.SIGHUP, signal.SIGUSR1) if signal.getsignal(n) is signal.SIG_IGN]
    return {n: signal.signal(n, handler) for n in SIGNALS if n not in ignored}


def end_at_signals() -> None:
    """Let a signal end this process with INTERRUPTED and one line on stderr, until `raise_at_signals`. An exception
    would be a traceback out of whatever is being imported."""
    global _ending, _is_command
    _ending = _is_command = True
    handle(_end)


def raise_at_signals() -> None:
    """Let signals raise KeyboardInterrupt, if `end_at_signals` was called; also a SIGINT that was ignored, as in a
    process that a shell started in the background."""
    global _ending
    if _ending:
        _ending = False
        handle(signal.default_int_handler)


def is_command() -> bool:
    """Return whether this process runs a command, not a program of a user that calls this package."""
    return _is_command


class Interrupts(AbstractContextManager["Interrupts"]):
    """While entered, the first signal raises KeyboardInterrupt in the main thread and all are remembered. To
    be entered in the main thread."""

    def __enter__(self) -> Self:
        global _shutdown_began
        _shutdown_began = None
        self._before, self._hook = handle(_interrupt), sys.unraisablehook
        sys.unraisablehook = self._print_lost
        return self

    def _print_lost(self, lost: "sys.UnraisableHookArgs") -> None:
        """Print an exception of a destructor as before, unless it is that of a signal, which is remembered."""
        if not (_received and issubclass(lost.exc_type, KeyboardInterrupt)):
            self._hook(lost)

    def install_again(self) -> None:
        """Replace handlers that a library has installed since."""
        for number in self._before:
            signal.signal(number, _interrupt)

    def __exit__(self, *exc_info: object) -> None:
        global _seconds, _logged
        for number, handler in self._before.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._hook
        _received.clear()
        _seconds, _logged = None, False


@contextmanager
def postponed(seconds: float) -> Iterator[None]:
    """Let the block finish when a signal comes, or came before: on leaving it, the signal raises KeyboardInterrupt.

    `seconds`: after the first signal, or after the start of the block where that is later. Then, and at a second
    Ctrl-C, EndNow is raised."""
    global _seconds, _began
    before, _seconds, _began = (_seconds, _began), seconds, time.monotonic()
    try:
        yield
    finally:
        _seconds, _began = before
    raise_if_interrupted()


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside `postponed`: a part that a signal ends at once, with KeyboardInterrupt."""
    global _seconds
    before, _seconds = _seconds, None
    try:
        raise_if_interrupted()
        yield
    finally:
        _seconds = before


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if a signal came since Interrupts was entered, unless the time of `postponed` lasts."""
    global _logged
    if not _received:
        return
    if _seconds is None:
        raise KeyboardInterrupt(f"signal {_received[0][0]}")
    if not _logged:
        _logged = True
        logger.warning(
            "Signal %d: finishing what has begun and saving, within %.0f s; a second Ctrl-C ends the run at once.",
            _received[0][0], _seconds,
        )  # fmt: skip
    if time.monotonic() > max(_received[0][1], _began) + _seconds:
        raise EndNow(f"signal {_received[0][0]}, and not finished {_seconds:g} s later")


def begin_shutdown() -> None:
    """Let signals interrupt nothing from now on: the process ends already, and a second Ctrl-C must not leave parts of
    it running. A signal that comes more than _SHUTDOWN_SECONDS later raises EndNow, as the shutdown hangs."""
    global _shutdown_began
    _shutdown_began = time.monotonic()


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, f"{NOTHING_STARTED}\n".encode())
    os._exit(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    before = _received[-1:]
    _received.append((number, now))
    if _shutdown_began is not None:
        if now > _shutdown_began + _SHUTDOWN_SECONDS:
            raise EndNow(f"signal {number}, in a shutdown that takes longer than {_SHUTDOWN_SECONDS:g} s")
        return
    if before and number == signal.SIGINT and now - before[0][1] > _SAME_SECONDS:
        raise EndNow(f"signal {number}, the second")
    if not before and _seconds is None:
        raise KeyboardInterrupt(f"signal {number}")
