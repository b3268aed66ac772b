"""A small process that kills every process of the driver when the driver exits.

Started with the read end of a pipe as standard input, whose other end the driver holds: end of file means that the
driver is gone. Until then it records the driver's descendants, by process id and start time; then it kills those that
are left, and theirs. Nothing else is ever killed.

Processes that are killed leave what they had named in /dev/shm: semaphores, segments. The watchdog removes what it saw
one of the driver's processes use, bears a name as the run's libraries give it, and is used by no running process. Other
containers may share /dev/shm: what their processes use looks unused from here, and is not removed. The folder for
temporary files of the attempt is removed as well.

A driver that did not announce its end cannot report the reason: Ray ends the process that it runs in without a message
when its own processes exit. The watchdog then reports it. It also ends a driver that Ray does not end: one that waits
for an actor to be placed by a raylet that has exited waits forever.
"""

import contextlib
import getpass
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

TEMPORARY = "SLIPSTREAM_TEMPORARY"
"""Environment variable of the processes of an attempt: its folder for temporary files (core/processes/watchdog.py)."""
_SHARED_MEMORY = Path("/dev/shm")

_LOOK_EVERY_SECONDS = 1.0
_WITHOUT_RAY_SECONDS = 15.0
"""That the driver may outlive Ray's processes: to shut the others down, or to end by itself."""
_RAYS = ("raylet", "gcs_server")
"""Children of a driver that has a cluster of its own."""
_GONE_SECONDS = 10.0
"""For what was killed to be gone."""
_GOODBYE = b"done"
_WITHOUT_GOODBYE = (
    "error: the driver ended without a message: it was killed, or its Ray cluster failed. All its processes have "
    "ended. If the command has ended as well, run it again: it continues from the newest recover checkpoint\n"
)
_KILLED = "error: the driver was killed, because Ray's processes had not run for {seconds:.0f} s: {why}\n"


@dataclass(frozen=True)
class Watchdog:
    """The watchdog as seen from the driver."""

    process: subprocess.Popen[bytes]

    def end(self) -> None:
        """Announce the end of the driver; return when the watchdog has ended the remaining processes, and itself."""
        self.process.communicate(_GOODBYE)


def start_watchdog(names: Sequence[str]) -> Watchdog:
    """Return the watchdog of this process. `names`: how names in /dev/shm begin that the run's libraries give."""
    pid = str(psutil.Process().pid)
    return Watchdog(
        subprocess.Popen([sys.executable, "-P", __file__, pid, *names], stdin=subprocess.PIPE, start_new_session=True)
    )


def descendants(process: psutil.Process) -> set[psutil.Process]:
    """Return everything below `process` now; empty when it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return set(process.children(recursive=True))
    return set()


def _is_child(process: psutil.Process, parent: psutil.Process, names: Sequence[str]) -> bool:
    try:
        return process.ppid() == parent.pid and process.name() in names
    except psutil.NoSuchProcess:
        return False


def _own_files(names: Sequence[str] = ("",)) -> dict[int, Path]:
    """Return this user's files in /dev/shm by their inodes; `names`: how the file names begin."""
    mine: dict[int, Path] = {}
    for path in _SHARED_MEMORY.iterdir() if _SHARED_MEMORY.is_dir() else ():
        with contextlib.suppress(OSError):
            if path.name.startswith(tuple(names)) and (status := path.stat()).st_uid == os.getuid():
                mine[status.st_ino] = path
    return mine


def _used_by(processes: Iterable[psutil.Process]) -> Iterator[int]:
    """Yield the inodes in /dev/shm that these processes have mapped or open."""
    for process in processes:
        with contextlib.suppress(OSError):
            yield from shared_inodes(Path(f"/proc/{process.pid}"))


def _wait_gone(processes: set[psutil.Process]) -> None:
    """Return when they hold nothing any more; that their parent has not taken note yet does not matter."""
    deadline = time.monotonic() + _GONE_SECONDS
    while time.monotonic() < deadline and any(map(_holds_something, processes)):
        time.sleep(0.02)


def _holds_something(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def unused_shared_memory() -> set[Path]:
    """Return this user's files in /dev/shm that no running process has open or mapped, as far as this process may see.

    Files are known by their inode: a semaphore is mapped under another name than its final one."""
    mine = _own_files()
    used = set(_used_by(psutil.process_iter())) if mine else set()
    return {path for inode, path in mine.items() if inode not in used}


def shared_inodes(process: Path) -> Iterator[int]:
    """Yield the inodes in /dev/shm that a process, given as its folder in /proc, has mapped or open. Raises OSError
    for a process that is gone or another user's."""
    here = f"{_SHARED_MEMORY}/"
    for line in (process / "maps").read_text(errors="replace").splitlines():
        if here in line:
            yield int(line.split(maxsplit=5)[4])
    for link in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since the folder was listed
            if os.readlink(link).startswith(here):
                yield link.stat().st_ino


def state_of(process: psutil.Process) -> str:
    """Return "" for a process that runs; otherwise its name and what keeps it: it has exited, or is stopped."""
    try:
        name = f"{process.name()} (process {process.pid})"
        stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return f"process {process.pid} has exited"
    if stopped:
        return f"{name} is stopped (SIGSTOP)"
    return "" if _holds_something(process) else f"{name} has exited"


def watchdog(driver: psutil.Process, names: Sequence[str]) -> bool:
    """Return when the driver and everything it started are gone: whether it ended in order. See start_watchdog()."""
    me = psutil.Process()
    judged, seen_in_use = set(_own_files(names)), set[int]()
    family: set[psutil.Process] = set()
    rays: set[psutil.Process] = set()
    with_ray = time.monotonic()
    while not select.select([sys.stdin], [], [], _LOOK_EVERY_SECONDS)[0]:
        new = _own_files(names).keys() - judged  # before the processes: one whose process is missed stays
        family |= descendants(driver)
        seen_in_use |= new & set(_used_by(family | {driver} if new else ()))
        judged |= new
        rays |= {p for p in family - rays if _is_child(p, driver, _RAYS)}
        if not (why := ", ".join(filter(None, map(state_of, rays)))):
            with_ray = time.monotonic()
        elif (seconds := time.monotonic() - with_ray) > _WITHOUT_RAY_SECONDS:
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                driver.kill()
                sys.stderr.write(_KILLED.format(seconds=seconds, why=why))
        # psutil compares process id and start time: an id that was given anew is not in the family.
        family = {p for p in family if p.is_running()} - {me}
    new = _own_files(names).keys() - judged
    for process in family.copy():
        family |= descendants(process)
    seen_in_use |= new & set(_used_by(family))
    for process in family - {me}:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _wait_gone(family - {me})
    for path in unused_shared_memory() if seen_in_use else ():
        with contextlib.suppress(OSError):
            if path.stat().st_ino in seen_in_use:
                path.unlink()
    return sys.stdin.buffer.read() == _GOODBYE


_RAY = "r"
_SOCKET = "/s12345678/r/session_2026-01-31_23-59-59_999999_4194304/sockets/plasma_store"
"""The longest socket of Ray below the folder for temporary files."""
_LONGEST_SOCKET = 107
"""Bytes of the path of a socket in Linux."""


def unusable_temporary() -> str | None:
    """Return why an attempt cannot have such a folder, or Ray its sockets in it; None: they can."""
    try:
        os.rmdir(make_temporary())
    except OSError as error:
        return f"no folder for temporary files: {error}; write a folder that you may write in, as /tmp"
    folder, most = _parent(), _LONGEST_SOCKET - len(_SOCKET)
    if (length := len(os.fsencode(folder))) <= most:
        return None
    return f"{folder}: the sockets of Ray need a path of at most {most} bytes, this one has {length}; write /tmp"


def make_temporary() -> str:
    """Return a new folder that this user alone can enter. Raises OSError."""
    return tempfile.mkdtemp(prefix="s", dir=_parent())


def use_temporary(folder: str) -> None:
    """Let this process, and those that it starts, write their temporary files there. What torch has compiled stays
    where it is found again."""
    with suppress(KeyError, OSError):  # a number without a name
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    os.environ["TMPDIR"] = os.environ[TEMPORARY] = folder
    tempfile.tempdir = None


def ray_folder() -> str:
    """Return the folder of a Ray cluster that this process starts, which Ray opens to everybody."""
    return str(Path(tempfile.gettempdir()) / _RAY)


def _parent() -> str:
    return os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()


if __name__ == "__main__":
    with contextlib.suppress(psutil.NoSuchProcess, KeyboardInterrupt):
        if not watchdog(psutil.Process(int(sys.argv[1])), sys.argv[2:]):
            sys.stderr.write(_WITHOUT_GOODBYE)
            shutil.rmtree(os.environ.get(TEMPORARY, ""), ignore_errors=True)
