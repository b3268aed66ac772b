"""The processes of a run, by name: each leaves a file in the log folder that says which one it is, and writes all its
Python stacks there when it is asked to.

Asking is a signal, so it works on a process that hangs in a library, holds the interpreter's lock or was stopped.
Invariant: a signal goes only to the very process that left its file: the start time is compared beside the number.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import socket
import time
from collections.abc import Collection, Iterator
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
"""Time that a process gets to write its stacks before whoever asked goes on, which may be to kill it."""
ASKING = signal.SIGRTMIN
"""Asks for stacks. LLVM, with which Triton compiles kernels, takes SIGUSR1, SIGUSR2 and SIGINT for itself; nothing that
a run loads takes the real-time ones. `kill -RTMIN PID` sends it."""
_open: list[TextIO] = []


def register_process(name: str, log_folder: Path) -> None:
    """Leave this process's file; from now on it answers to ask_for_stacks()."""
    folder = log_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    me = psutil.Process()
    _put_aside(folder / f"{name}.txt")
    file = open(folder / f"{name}.txt", "a")  # noqa: SIM115 (the signal handler writes there as long as we live)
    file.write(json.dumps({"pid": me.pid, "started": me.create_time(), "host": socket.gethostname()}) + "\n")
    file.flush()
    faulthandler.register(ASKING, file=file, all_threads=True)
    _open.append(file)


def _put_aside(file: Path) -> None:
    """Keep what an earlier process of the name has written: it says where that one hung."""
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


def ask_for_stacks(log_folder: Path, names: Collection[str] | None = None, *, why: str) -> dict[str, str]:
    """Let the processes of this machine write their stacks (`names`: only these); name -> its state: "running",
    "stopped" or "gone". One that was stopped goes on, else it could not answer. Of one that writes nothing its file
    says what the kernel knows. Raises OSError where the files cannot be written."""
    states = {}
    asked: list[tuple[Path, int, psutil.Process]] = []
    for name, file, process in _processes(log_folder, names):
        states[name] = "gone"
        if process is None:
            continue
        try:
            stopped = process.status() == psutil.STATUS_STOPPED
            states[name] = "stopped" if stopped else "running"
            with open(file, "a") as f:
                f.write(f"\n--- {time.strftime('%Y-%m-%d %H:%M:%S')} {name} ({states[name]}): {why}\n")
                asked.append((file, f.tell(), process))
            for one in (process, *(child for child in process.children(recursive=True) if _answers(child))):
                one.send_signal(ASKING)
                if one.status() == psutil.STATUS_STOPPED:
                    one.send_signal(signal.SIGCONT)
        except (psutil.Error, ProcessLookupError, PermissionError) as error:
            with suppress(OSError), open(file, "a") as f:
                f.write(f"Asking failed with {error!r}\n")
    if any(state != "gone" for state in states.values()):
        time.sleep(_WRITING_SECONDS)
    for file, size, process in asked:
        with suppress(OSError):
            if file.stat().st_size == size:
                with open(file, "a") as f:
                    f.write(f"Nothing was written within {_WRITING_SECONDS} s: {_why_silent(process, file)}\n")
    return states


def _why_silent(process: psutil.Process, file: Path) -> str:
    """What the kernel tells of a process that was asked for its stacks and did not write them; not every kernel tells
    everything."""
    if _same(process.pid, process.create_time()) is None:
        return "it has ended since"
    status = _status(process.pid)
    findings = {
        "its main thread blocks SIGRTMIN": _marked(status, "SigBlk"),
        "it ignores SIGRTMIN": _marked(status, "SigIgn"),
        "the signal waits to be taken": _marked(status, "ShdPnd"),
        "it has closed this file": _has_closed(process.pid, file),
    }
    found = [text for text, holds in findings.items() if holds]
    if not found:
        handled = _marked(status, "SigCgt")
        found = ["its handler is not ours, writes elsewhere or is slow" if handled else "the kernel does not tell why"]
    place = _of_kernel(process.pid, "wchan").strip()
    where = f", in the kernel at {place}" if place not in ("", "0") else ""
    return f"{', '.join(found)}; its main thread's state is {status.get('State', 'unknown')}{where}"


def _of_kernel(pid: int, name: str) -> str:
    """What /proc says; "" where it does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    return ""


def _status(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status."""
    lines = (line.partition(":") for line in _of_kernel(pid, "status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _marked(status: dict[str, str], mask: str) -> bool:
    """Whether the signal that asks is in this mask."""
    return bool(int(status.get(mask, "0"), 16) >> (ASKING - 1) & 1)


def _has_closed(pid: int, file: Path) -> bool:
    """Whether its descriptors can be seen and none leads there. Asks nothing of the files."""
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    target = str(file.resolve())
    for link in links:
        with suppress(OSError):
            if os.readlink(link) == target:
                return False
    return True


def kill_process(log_folder: Path, name: str) -> None:
    """End this process, if it is on this machine and still there."""
    for _, _, process in _processes(log_folder, [name]):
        if process is not None:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _processes(log_folder: Path, names: Collection[str] | None) -> Iterator[tuple[str, Path, psutil.Process | None]]:
    """(name, file, the process or None when it has ended) of the others on this machine."""
    for file in sorted((log_folder / FOLDER).glob("*.txt")):
        if names is not None and file.stem not in names:
            continue
        with suppress(OSError, ValueError, KeyError):
            with open(file) as f:
                said = json.loads(f.readline())
            if said["host"] == socket.gethostname() and said["pid"] != os.getpid():
                yield file.stem, file, _same(said["pid"], said["started"])


def _answers(process: psutil.Process) -> bool:
    """Whether it has a handler for the signal, as the processes of a SGLang server have, which write into their log."""
    return _marked(_status(process.pid), "SigCgt")


def _same(pid: int, started: float) -> psutil.Process | None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def forget_modules() -> None:
    """To be called when a process is ready: what there is now is not looked through for garbage any more. Several times
    a minute that would take half a second."""
    gc.collect()
    gc.freeze()
