"""What code in the sandbox can do, and what a caller gets to know of it."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest

import slipstream
from rollout.sandbox.pool import Ran, Sandbox, SandboxError, SandboxSettings


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(SandboxSettings(seconds=60.0, output_chars=100, modules=("numpy",)))
    yield sandbox
    sandbox.close()


@pytest.mark.parametrize(
    ("code", "output", "status"),
    [
        ("print(6 * 7)", "42\n", "ok"),
        ("x = 20\nx + 22", "42\n", "ok"),
        ("None", "", "ok"),
        ("", "", "ok"),
        ("def f(n):\n    return f(n - 1) * n if n else 1\nprint(f(5))", "120\n", "ok"),
        ("import numpy\nint(numpy.arange(4).sum())", "6\n", "ok"),
        ("print(input())\nprint(input())", "first\nsecond\n", "ok"),
        ("print('before')\n1 / 0", 'before\nTraceback (most recent call last):\n  File "<code>", line 2', "error"),
        ("raise SystemExit(2)", "", "error"),
        ("print('ä€')", "ä€\n", "ok"),
        ("print('\\ud800')", "\\ud800\n", "ok"),
        ("print('x' * 200)", "x" * 100 + "\n[output cut]\n", "ok"),
    ],
)
def test_a_caller_gets_what_code_printed_its_last_value_or_its_error(code, output, status, sandbox) -> None:
    ran = sandbox.run(code, "first\nsecond\n")
    assert ran.output.startswith(output) and ran.status == status
    assert status == "error" or ran.output == output


def test_calls_run_at_the_same_time_and_know_nothing_of_each_other(sandbox: Sandbox) -> None:
    async def main() -> list[str]:
        codes = [f"import random\nmine = {i}\nprint('theirs' in dir(), random.random())" for i in range(6)]
        return [ran.output for ran in await asyncio.gather(*map(sandbox.run_async, codes))]

    outputs = asyncio.run(main())
    assert len(set(outputs)) == 1  # also the generator of random numbers begins anew
    assert outputs[0].startswith("False")


def test_a_worker_that_is_killed_is_replaced() -> None:
    sandbox = Sandbox(SandboxSettings(seconds=60.0, num_workers=1))
    assert sandbox.run("1").output == "1\n"
    end_workers()
    assert sandbox.run("2").output == "2\n"
    with ThreadPoolExecutor() as pool:
        running = pool.submit(sandbox.run, "import time\ntime.sleep(60)")
        while len(running_workers()) < 2:  # a call runs in a child of its worker
            time.sleep(0.01)
        end_workers()
        assert running.result() == Ran("ended by signal 9\n", "crashed")
    assert sandbox.run("3").output == "3\n"
    sandbox.close()


def running_workers() -> list[psutil.Process]:
    return [c for c in psutil.Process().children(recursive=True) if "rollout.sandbox.worker" in c.cmdline()]


def end_workers() -> None:
    workers = running_workers()
    for worker in workers:
        with suppress(psutil.NoSuchProcess):  # a call's process ends with its worker
            worker.kill()
    psutil.wait_procs(workers)


def test_code_that_prints_too_much_ends_in_one_way(sandbox: Sandbox) -> None:
    codes = ("print('x' * 500)", "import os\nos.write(1, b'x' * 1000)\nprint('more')", "while True: print('x' * 99)")
    for code in codes:
        found = {sandbox.run(code) for _ in range(5)}
        assert [(ran.status, ran.output.count("[output cut]")) for ran in found] == [("error", 1)]


def test_where_the_host_allows_no_namespaces_the_next_level_is_in_force() -> None:
    code = "from rollout.sandbox.pool import *\ns = Sandbox()\nprint(s.level, s.run('6 * 7').output)"
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    found = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", forbid, "sh", sys.executable, "-c", code], capture_output=True, text=True
    )
    if "unshare" in found.stderr:
        pytest.skip(found.stderr)
    assert found.stdout == "seccomp 42\n\n", found.stderr


def test_a_level_that_is_unknown_or_missing_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match="sandbox level 'docker': use auto or one of namespaces, seccomp"):
        Sandbox(SandboxSettings(level="docker"))
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    with pytest.raises(SandboxError, match=r"pip install 'slipstream\[sandbox\]'"):
        Sandbox(SandboxSettings(level="interpreter")).run("1")


def test_a_reward_can_run_code() -> None:
    assert slipstream.run_python("print(int(input()) + 1)", "41").output == "42\n"
