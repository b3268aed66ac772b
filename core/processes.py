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
_BIT = signal.SIGUSR1 - 1
"""Of this signal, in the masks of /proc/PID/status."""
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
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
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
    "stopped" or "gone". One that was stopped goes on, else it could not answer."""
    states = {}
    asked: list[tuple[Path, int, psutil.Process]] = []
    for name, file, process in _processes(log_folder, names):
        states[name] = "gone"
        with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if process is None:
                continue
            stopped = process.status() == psutil.STATUS_STOPPED
            states[name] = "stopped" if stopped else "running"
            with open(file, "a") as f:
                f.write(f"\n--- {time.strftime('%Y-%m-%d %H:%M:%S')} {name} ({states[name]}): {why}\n")
                asked.append((file, f.tell(), process))
            for one in (process, *(child for child in process.children(recursive=True) if _answers(child))):
                one.send_signal(signal.SIGUSR1)
                if one.status() == psutil.STATUS_STOPPED:
                    one.send_signal(signal.SIGCONT)
    if any(state != "gone" for state in states.values()):
        time.sleep(_WRITING_SECONDS)
    for file, size, process in asked:
        with suppress(OSError):
            if file.stat().st_size == size:
                with open(file, "a") as f:
                    f.write(f"Nothing was written within {_WRITING_SECONDS} s: {_why_silent(process.pid, file)}\n")
    return states


def _why_silent(pid: int, file: Path) -> str:
    """What the kernel knows of a process that was asked for its stacks and did not write them."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        known = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        descriptors = {os.path.realpath(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
        waits = Path(f"/proc/{pid}/wchan").read_text()
    except OSError as error:
        return f"the process has ended, or may not be looked at ({error})"
    marked = {name for name in ("SigBlk", "SigIgn", "SigCgt", "ShdPnd") if int(known[name], 16) >> _BIT & 1}
    findings = {
        "its main thread blocks SIGUSR1": "SigBlk" in marked,
        "it ignores SIGUSR1": "SigIgn" in marked,
        "it has no handler for SIGUSR1": not marked & {"SigIgn", "SigCgt"},
        "the signal waits to be taken": "ShdPnd" in marked,
        "it has closed this file": str(file.resolve()) not in descriptors,
    }
    found = [text for text, holds in findings.items() if holds] or ["somebody else handles its SIGUSR1, or it is slow"]
    return (
        f"{', '.join(found)}; its state is {known['State']}, in the kernel at {waits if waits != '0' else 'no place'}"
    )


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
    with suppress(OSError, psutil.Error):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        (caught,) = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
        return bool(int(caught, 16) >> _BIT & 1) and "sglang_inside" in " ".join(process.cmdline())
    return False


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
