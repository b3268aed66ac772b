"""A small process beside the driver: when the driver is gone, however it went, nothing that it started stays.

Started with the read end of a pipe as standard input, whose other end the driver holds: end of file means that the
driver is gone. Until then it remembers the driver's descendants, by process id and start time; then it kills those that
are left, and theirs. No name is ever matched.

A driver that did not say goodbye cannot say what happened either: Ray ends the process that it runs in without a word
when its own processes die. The guard then says it.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
from dataclasses import dataclass

import psutil

_LOOK_EVERY_SECONDS = 1.0
_GOODBYE = b"done"
_WITHOUT_GOODBYE = (
    "error: the run ended without a word of its own: its process was killed, or its Ray cluster died. Nothing of it is "
    "left running; the same command with recover_mode=auto continues from its last recover checkpoint, if any\n"
)


@dataclass(frozen=True)
class Guard:
    """The guard as seen from the driver."""

    process: subprocess.Popen[bytes]

    def end(self) -> None:
        """Say goodbye; returns when the guard has ended what was left, and itself."""
        self.process.communicate(_GOODBYE)


def start_guard() -> Guard:
    """The guard of this process."""
    pid = str(psutil.Process().pid)
    return Guard(subprocess.Popen([sys.executable, __file__, pid], stdin=subprocess.PIPE, start_new_session=True))


def descendants(process: psutil.Process) -> set[psutil.Process]:
    """Everything below `process` now; empty when it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return set(process.children(recursive=True))
    return set()


def guard(driver: psutil.Process) -> bool:
    """Return when the driver and everything it started are gone: whether it said goodbye."""
    me = psutil.Process()
    family: set[psutil.Process] = set()
    while not select.select([sys.stdin], [], [], _LOOK_EVERY_SECONDS)[0]:
        family |= descendants(driver)
        # psutil compares process id and start time: an id that was given anew is not in the family.
        family = {p for p in family if p.is_running()} - {me}
    for process in family.copy():
        family |= descendants(process)
    for process in family - {me}:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return sys.stdin.buffer.read() == _GOODBYE


if __name__ == "__main__":
    with contextlib.suppress(psutil.NoSuchProcess, KeyboardInterrupt):
        if not guard(psutil.Process(int(sys.argv[1]))):
            sys.stderr.write(_WITHOUT_GOODBYE)
