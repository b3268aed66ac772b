"""One warm worker of the sandbox: a small interpreter that forks a locked child for each call. Started by pool.py.

Over its socket come the limits of a call with two file descriptors: the code, and where its output goes. Back goes how
the child ended. Invariant: this process never reads code, nor output; a child sees the worker's memory, so nothing of
other calls is in it. Standard library only: every call copies this process.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass

from rollout.sandbox import lockdown
from rollout.sandbox.guest import PRELOADED, run_code, warm_up

CALL = struct.Struct("<dQQ")
"""Seconds, bytes of memory, bytes of the code, which the program's input follows."""
ENDED = struct.Struct("<iB")
"""Exit code, negative for a signal, and whether it took too long."""
_FILE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Guest:
    """What a child does before it runs code."""

    has_namespaces: bool
    own_bytes: int
    """Address space of the worker."""
    system_calls: lockdown.SystemCallFilter

    def run(self, fds: list[int], memory_bytes: int, seconds: float, code_bytes: int) -> None:
        """Give up everything, run the code and end this process."""
        code = 1
        try:
            lockdown.die_with_parent()
            for target, fd in enumerate((fds[0], fds[1], fds[1])):
                os.dup2(fd, target)
            os.closerange(3, 1024)
            if self.has_namespaces:
                lockdown.private_work_folder(_FILE_BYTES)
            lockdown.limit(AS=self.own_bytes + memory_bytes, CPU=int(seconds) + 2)
            self.system_calls.enforce()
            code = run_code(code_bytes) if code_bytes else 0
        except OSError as error:
            code = error.errno or 1
        finally:
            os._exit(code)


def main(argv: list[str]) -> None:
    """Run a worker. `argv`: file descriptor of the socket, level, modules to import as json."""
    channel, level, modules = socket.socket(fileno=int(argv[0])), argv[1], json.loads(argv[2])
    for name in (*PRELOADED, *modules):
        importlib.import_module(name)
    with open("/proc/self/statm") as file:
        own_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    sys.path[:] = [folder for folder in sys.path if _is_library(folder)]
    os.environ.clear()
    try:
        lockdown.check_platform()
        if level == "namespaces":
            lockdown.enter_namespaces(_folders(modules), root="/proc")
        guest = Guest(level == "namespaces", own_bytes, lockdown.SystemCallFilter(files=level == "namespaces"))
        lockdown.limit(FSIZE=_FILE_BYTES, NOFILE=64, CORE=0)
        warm_up()
        gc.freeze()  # children share the memory of what is not collected
        _serve_one(channel, guest, trial=True)
    except OSError as error:
        channel.sendall(str(error).encode() + b"\n")
        return
    channel.sendall(b"ready\n")
    with suppress(EOFError):
        while True:
            _serve_one(channel, guest)


def _serve_one(channel: socket.socket, guest: Guest, *, trial: bool = False) -> None:
    """Take a call and say how it ended; as a `trial` one that does nothing. Raises EOFError at the end of the channel,
    OSError where a trial fails."""
    if trial:
        seconds, memory_bytes, code_bytes, fds = 10.0, 2**28, 0, [os.open("/", os.O_RDONLY) for _ in range(2)]
    else:
        message, fds, _, _ = socket.recv_fds(channel, CALL.size, 2)
        if len(message) < CALL.size:
            raise EOFError
        seconds, memory_bytes, code_bytes = CALL.unpack(message)
    child = lockdown.fork()
    if not child:
        guest.run(fds, memory_bytes, seconds, code_bytes)
    for fd in fds:
        os.close(fd)
    watched = os.pidfd_open(child)
    others = [] if trial else [channel.fileno()]
    ended = select.select([watched, *others], [], [], seconds)[0]
    os.close(watched)
    if late := watched not in ended:  # too long, or the pool is gone
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not trial:
        channel.sendall(ENDED.pack(code, late))
    elif code:
        raise OSError(code, f"seccomp or limits: {os.strerror(code) if code > 0 else f'signal {-code}'}")


def _is_library(folder: str) -> bool:
    return os.path.isdir(folder) and ("site-packages" in folder or folder.startswith(sys.base_prefix))


def _folders(modules: list[str]) -> list[str]:
    """Return the folders of the standard library and of the `modules` that are installed elsewhere."""
    files = [os.path.realpath(getattr(sys.modules[name], "__file__", None) or os.__file__) for name in modules]
    installed = {
        folder for folder in map(os.path.realpath, sys.path) for file in files if file.startswith(f"{folder}/")
    }
    library = os.path.dirname(os.path.realpath(os.__file__))
    others = {folder for folder in installed if not f"{library}/".startswith(f"{folder}/")}
    return [library, *sorted(folder for folder in others if not folder.startswith(f"{library}/"))]


if __name__ == "__main__":
    main(sys.argv[1:])
