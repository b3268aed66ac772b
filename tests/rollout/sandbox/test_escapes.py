"""Code that tries to leave the sandbox, at every level that this host allows: nothing succeeds.

`HOST` has what is outside: the paths of a secret file and of a folder, a port and an abstract socket that listen, and
the process ids of the test and of a worker. Attempts use raw system calls where a library would refuse by itself.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout.sandbox.pool import LEVELS, Sandbox, SandboxError, SandboxSettings

_PRELUDE = """
import ctypes, fcntl, mmap, os, resource, select, signal, socket, struct, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
def escaped(found=True):
    if found:
        print("ESCAPED", found)
"""
_MODULES = ("ctypes", "fcntl", "mmap", "resource", "select", "signal", "socket", "subprocess", "multiprocessing")
_MARK = f"mark{secrets.token_hex(4)}"
_BLOCKS = Path(__file__).with_name("escapes.txt").read_text().split("### ")[1:]
_CODE = {block.partition("\n")[0]: block.partition("\n")[2] for block in _BLOCKS}


@pytest.fixture(scope="module", params=LEVELS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Yield a sandbox of one level; fail where an attempt has ended its worker or left a process."""
    modules = _MODULES if request.param == "seccomp" else ()
    sandbox = Sandbox(SandboxSettings(level=request.param, seconds=0.5, modules=modules, num_workers=1))
    try:
        assert sandbox.level == request.param
    except SandboxError as error:
        pytest.skip(str(error))
    sandbox.run(f"open('left', 'w').write('x')\n{_MARK}_before = 1")
    before = _workers()
    yield sandbox
    sandbox._settings = replace(sandbox._settings, seconds=60.0)  # enough on a busy host
    assert sandbox.run("6 * 7").output == "42\n"
    assert _workers() == before
    sandbox.close()


def _workers() -> list[int]:
    """Return the processes of sandboxes; those that code starts are forks of them."""
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if "rollout.sandbox.worker" in child.cmdline()]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Return what attempts reach for; fail where one has left a trace."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "victim").write_text("here")
    (folder / "secret").write_text("secret")
    signals: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: signals.append(1))
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as abstract:
        server.bind(("127.0.0.1", 0))
        abstract.bind(f"\0{_MARK}")
        for one in (server, abstract):
            one.listen()
            one.settimeout(0)
        facts = {"port": server.getsockname()[1], "name": _MARK, "mark": _MARK, "pid": os.getpid()}
        yield {**facts, "folder": str(folder), "secret": str(folder / "secret")}
        for one in (server, abstract):
            with pytest.raises(BlockingIOError):
                one.accept()
    signal.signal(signal.SIGUSR1, before)
    assert not signals
    assert sorted(os.listdir(folder)) == ["secret", "victim"]
    assert (folder / "victim").read_text() == "here"
    assert not Path("/dev/shm", _MARK).exists()


@pytest.mark.parametrize("name", _CODE)
def test_no_attempt_leaves_the_sandbox(name: str, sandbox: Sandbox, host: dict[str, Any]) -> None:
    facts = {**host, "worker": max(_workers(), default=1)}
    ran = sandbox.run(f"HOST = {facts!r}{_PRELUDE}{_CODE[name]}")
    assert "ESCAPED" not in ran.output
    assert "secret\n" not in ran.output


def test_attempts_succeed_without_a_sandbox(tmp_path: Path) -> None:
    """Otherwise the test above would show nothing."""
    (tmp_path / "secret").write_text("secret")
    host = {"secret": str(tmp_path / "secret"), "mark": "m", "pid": os.getpid(), "worker": 1}
    free = {name: code for name, code in _CODE.items() if name.endswith("(free)")}
    script = f"""
import json, os, sys, tempfile
codes = json.load(sys.stdin)
__import__("signal").signal(10, 1)
for number, code in enumerate(codes):
    if not os.fork():
        folder = tempfile.mkdtemp(dir={str(tmp_path)!r})
        os.chdir(folder)
        open("victim", "w").close()
        HOST = {host!r} | {{"folder": folder, "pid": os.getpid(), "mark": f"m{{number}}", "name": "n", "port": 9}}
        try:
            exec({_PRELUDE!r} + code)
        except BaseException:
            pass
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
    found = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(list(free.values())),
        text=True,
        capture_output=True,
        check=True,
    )
    assert found.stdout.count("ESCAPED") >= len(free) // 2
