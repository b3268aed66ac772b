"""The processes of a run, by name: each leaves a file in the log folder that identifies it, and writes all its Python
stacks there on request. The request is a signal, so it works on a process that hangs in a library, holds the
interpreter's lock or was stopped. Invariant: a signal goes only to the very process that left its file: the start time
is compared beside the number.
"""

import faulthandler
import gc
import json
import os
import signal
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import psutil

FOLDER = "stacks"
"""Below the log folder."""
EARLIER = "earlier"
"""Below that: stacks of processes of the same name in attempts before this one."""
_KEPT = 3
"""Of each name."""
_WRITING_SECONDS = 0.5
"""Time that a process gets to write its stacks before the requesting process continues, possibly by killing it."""
_PAUSE_SECONDS, _LONGEST_SECONDS = 0.2, 3.0
"""One that is still writing gets more: until it writes nothing for the former, at the end of a line; at most the
latter."""
_SETTLED_SECONDS = 1.0
"""A younger child may be about to become another program, and lose its handler, before it gets the signal."""
STACKS = signal.SIGRTMIN
"""Requests stacks; `kill -RTMIN PID` sends it. LLVM, with which Triton compiles kernels, takes SIGUSR1 and the usual
signals to end a process for itself."""
_open: list[TextIO] = []


def register_process(name: str, log_folder: Path) -> None:
    """Leave this process's file; from now on it answers to collect_stacks()."""
    folder = log_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    me = psutil.Process()
    _put_aside(folder / f"{name}.txt")
    file = open(folder / f"{name}.txt", "a")  # noqa: SIM115 (the signal handler writes there as long as we live)
    faulthandler.register(STACKS, file=file, all_threads=True)
    os.register_at_fork(after_in_child=lambda: faulthandler.unregister(STACKS))  # it would write into its parent's file
    file.write(json.dumps({"pid": me.pid, "started": me.create_time(), "host": socket.gethostname()}) + "\n")
    file.flush()
    _open.append(file)


def _put_aside(file: Path) -> None:
    """Keep what an earlier process of the name has written: it shows where that one hung."""
    try:
        with open(file) as f:
            says_more = len(f.readlines()) > 1  # than which process it was
    except FileNotFoundError:
        return
    if not says_more:
        file.unlink(missing_ok=True)
        return
    earlier = file.parent / EARLIER
    earlier.mkdir(exist_ok=True)
    written = time.strftime("%Y%m%d-%H%M%S", time.localtime(file.stat().st_mtime))
    file.rename(earlier / f"{file.stem}.{written}.txt")
    for old in sorted(earlier.glob(f"{file.stem}.*.txt"))[:-_KEPT]:
        old.unlink(missing_ok=True)


def collect_stacks(log_folder: Path, names: Collection[str] | None = None, *, why: str) -> dict[str, str]:
    """Let the processes of this machine write their stacks (`names`: only these), with those of their children that
    have no name; name -> its state: "running", "stopped" or "gone". One that was stopped is continued, else it could
    not answer. Raises OSError where the files cannot be written."""
    states = {}
    known = list(_processes(log_folder))
    named = {process.pid for _, _, process in known if process is not None}
    signalled: list[tuple[Path, int]] = []
    for name, file, process in known:
        if names is not None and name not in names:
            continue
        states[name] = "gone"
        if process is None:
            continue
        try:
            stopped = process.status() == psutil.STATUS_STOPPED
            states[name] = "stopped" if stopped else "running"
            with open(file, "a") as f:
                f.write(f"\n--- {time.strftime('%Y-%m-%d %H:%M:%S')} {name} ({states[name]}): {why}\n")
                signalled.append((file, f.tell()))
            _signal(process)
            for child in _unnamed_children(process, named):
                with suppress(psutil.Error, ProcessLookupError, PermissionError):
                    _signal(child)
        except (psutil.Error, ProcessLookupError, PermissionError) as error:
            with suppress(OSError), open(file, "a") as f:
                f.write(f"Sending the signal failed: {error!r}\n")
    if any(state != "gone" for state in states.values()):
        _wait_until_written([file for file, _ in signalled])
    for file, size in signalled:
        with suppress(OSError):
            if file.stat().st_size == size:
                with open(file, "a") as f:
                    f.write(f"Nothing was written within {_WRITING_SECONDS} s.\n")
    return states


def _wait_until_written(files: Sequence[Path]) -> None:
    begin = grew = time.monotonic()
    ends: list[tuple[int, bool]] = []
    while (now := time.monotonic()) - begin < _LONGEST_SECONDS:
        before, ends = ends, [_end(file) for file in files]
        if ends != before:
            grew = now
        if now - begin >= _WRITING_SECONDS and now - grew >= _PAUSE_SECONDS and all(whole for _, whole in ends):
            return
        time.sleep(0.05)


def _end(file: Path) -> tuple[int, bool]:
    """Return the size of a file, and whether its last line is whole; 0 and True where it cannot be read."""
    with suppress(OSError), open(file, "rb") as f:
        size = f.seek(0, os.SEEK_END)
        f.seek(max(0, size - 1))
        return size, f.read(1) in (b"", b"\n")
    return 0, True


def _signal(process: psutil.Process) -> None:
    process.send_signal(STACKS)
    if process.status() == psutil.STATUS_STOPPED:
        process.send_signal(signal.SIGCONT)


def _unnamed_children(process: psutil.Process, named: set[int]) -> Iterator[psutil.Process]:
    """Yield the descendants that can answer, such as the processes of a server, which write into its log. A named one
    gets the signal by name, and writes its own."""
    others = set()
    for child in process.children(recursive=True):  # each after its parent
        with suppress(psutil.Error):
            if child.pid in named or child.ppid() in others:
                others.add(child.pid)
            elif time.time() - child.create_time() > _SETTLED_SECONDS:
                caught = int(_status(child.pid).get("SigCgt", "0"), 16)
                if caught >> (STACKS - 1) & 1:  # the signal would end another one
                    yield child


def _status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; none where it cannot be read."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def kill_process(log_folder: Path, name: str) -> None:
    """End this process, if it is on this machine and still there."""
    for found, _, process in _processes(log_folder):
        if found == name and process is not None:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _processes(log_folder: Path) -> Iterator[tuple[str, Path, psutil.Process | None]]:
    """Yield (name, file, the process or None when it has ended) of the others on this machine."""
    for file in sorted((log_folder / FOLDER).glob("*.txt")):
        with suppress(OSError, ValueError, KeyError):
            with open(file) as f:
                header = json.loads(f.readline())
            if header["host"] == socket.gethostname() and header["pid"] != os.getpid():
                yield file.stem, file, _same(header["pid"], header["started"])


def _same(pid: int, started: float) -> psutil.Process | None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def forget_modules() -> None:
    """Exclude present objects from garbage collection, when a process is ready. Several times a minute that would take
    half a second."""
    gc.collect()
    gc.freeze()
