"""A server that forks Python programs from a process that has imported their libraries.

Most of the processor time of a small run is `import torch` and `import megatron` in each of its processes. Tests start
the command line, and with it the workers of Ray, as forks of one process that has imported them already; so are the
processes of pytest-xdist themselves (launcher.py) and the ranks of tests/helpers/mcore_ranks.py. What runs then
is the same: the program with its arguments, environment, working directory and standard streams, in a process of its
own. SLIPSTREAM_TEST_FRESH=1 starts new interpreters instead (as `make nightly` does).

    python -m helpers.forks.server OWNER MODULE...   # imports the modules, then serves until process OWNER ends
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_STREAMS = 3
_LENGTH_BYTES = 8
_AGENTS = ("aiohttp.web", "ray.dashboard.agent", "ray._private.runtime_env.agent.runtime_env_agent")
"""What Ray's agents import."""


class ForkedProgram:
    """What subprocess.Popen offers, of a program that a server forked."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        """Return the exit code as subprocess.Popen does; None while it runs."""
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since, or its exit code is on the way
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
            answer = self._connection.recv(_LENGTH_BYTES)
            assert answer, "the fork server has ended"
            self.returncode = int.from_bytes(answer, "little", signed=True)
            self._connection.close()
        return self.returncode


def server_address(pid: int) -> str:
    return f"slipstream-tests-{pid}"


def agents_address(server: str) -> str:
    """Return the address of the server of Ray's agents that belongs to a server."""
    return f"{server}-agents"


def start_program(
    address: str,
    words: Sequence[str],
    *,
    env: dict[str, str],
    cwd: str,
    streams: Sequence[int],
    session: bool = False,
    first: str = "",
) -> ForkedProgram:
    """Run `words`, what follows `python` on a command line (-m MODULE, -c CODE or a file, and its arguments), with the
    three standard streams given as file descriptors. `session`: in a new one. `first`: a module to import before."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_name(address))
    request = json.dumps({"words": list(words), "env": env, "cwd": cwd, "session": session, "first": first}).encode()
    socket.send_fds(connection, [len(request).to_bytes(_LENGTH_BYTES, "little")], list(streams))
    connection.sendall(request)
    answer = connection.recv(_LENGTH_BYTES)
    assert answer, "the fork server has ended"
    return ForkedProgram(connection, int.from_bytes(answer, "little", signed=True))


def _name(address: str) -> str:
    """Return the name of a socket that is no file, and so never left behind."""
    return f"\0{address}"


def serve(listener: socket.socket, *owner: int) -> None:
    """Fork what is requested, and send each exit code, until the process of the descriptor `owner` ends."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(writing)
    programs: dict[int, socket.socket] = {}
    while True:
        ready = select.select([listener, reading, *owner], [], [])[0]
        if set(owner) & set(ready):
            return
        if listener in ready:
            connection = listener.accept()[0]
            with contextlib.suppress(OSError, ValueError):
                request, streams = _receive(connection)
                if (pid := os.fork()) == 0:
                    _run(request, streams)
                for stream in streams:
                    os.close(stream)
                programs[pid] = connection
                connection.sendall(pid.to_bytes(_LENGTH_BYTES, "little", signed=True))
        if reading in ready:
            os.read(reading, 65536)
        for pid, code in _ended():
            if (client := programs.pop(pid, None)) is not None:
                with client, contextlib.suppress(OSError):
                    client.sendall(code.to_bytes(_LENGTH_BYTES, "little", signed=True))


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, streams, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, _STREAMS)
    length, request = int.from_bytes(head, "little"), b""
    while len(request) < length:
        if not (part := connection.recv(length - len(request))):
            raise ValueError("cut off")
        request += part
    return json.loads(request), streams


def _ended() -> Iterable[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def _run(request: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    """In the fork: become the program, and exit as an interpreter does."""
    code = 1
    try:
        _become(request, streams)
        if request["first"]:
            importlib.import_module(request["first"])
        code = _result(request["words"])
    except BaseException:  # noqa: BLE001  an interpreter shows whatever comes up to it
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # join the threads that are no daemons
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _become(request: dict[str, Any], streams: Sequence[int]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["session"]:
        os.setsid()
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    _forget_files()
    os.chdir(request["cwd"])
    before = os.environ.get("PYTHONPATH", "")
    os.environ.clear()
    os.environ.update(request["env"])
    words = request["words"]
    sys.orig_argv = [sys.executable, *words]
    first = request["cwd"] if words[0] in ("-m", "-c") else str(Path(words[0]).parent)
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    known = [path for path in sys.path[1:] if path not in before.split(os.pathsep)]
    sys.path[:] = [first, *added, *known]
    importlib.invalidate_caches()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _forget_files(except_for: int | None = None) -> None:
    """Put /dev/null in place of the files that this process has open beside its standard streams. Their numbers stay in
    use: the objects that hold them may still close them."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number >= _STREAMS and number not in (null, except_for):
            with contextlib.suppress(OSError):  # the folder that was listed
                os.fstat(number)
                os.dup2(null, number, inheritable=False)


def _result(words: list[str]) -> int:
    """Run the program; return its exit code."""
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # that the module is imported already
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(words[1], main.__dict__)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    return 0


def fork_server(address: str, modules: Sequence[str] = ()) -> None:
    """Fork this process into a server at `address`, which ends with the calling thread. It imports the modules when it
    gets its first request."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_name(address))
    listener.listen(64)
    parent = os.getpid()
    # An exception of a signal in what Python calls at a fork would be printed and lost.
    held_back = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    child = os.fork()
    signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
    if child:
        listener.close()
        return
    try:
        _die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _forget_files(except_for=listener.fileno())
        if modules:
            select.select([listener], [], [])
            _import(modules)
        serve(listener)
    finally:
        os._exit(1)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _import(modules: Iterable[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # no fork looks for garbage among the libraries


def main() -> None:
    owner, *modules = sys.argv[1:]
    owner_ends = os.pidfd_open(int(owner))
    _import(modules)
    fork_server(agents_address(server_address(os.getpid())), _AGENTS)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_name(server_address(os.getpid())))
    listener.listen(64)
    print("listening", flush=True)
    serve(listener, owner_ends)


if __name__ == "__main__":
    main()
