"""Processes that hang say where, whatever they hang in."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from core.processes import stacks
from core.processes.stacks import FOLDER, collect_stacks, kill_process

ROOT = Path(__file__).resolve().parents[3]
SLEEPER = """
import sys, threading, time
from pathlib import Path
from core.processes.stacks import register_process
register_process(sys.argv[1], Path(sys.argv[2]))
exec(sys.argv[3])
def hanging_here():
    print("ready", flush=True)
    threading.Lock().acquire() and threading.Event().wait()
hanging_here()
"""


def start(name: str, folder: Path, then: str = "") -> subprocess.Popen[str]:
    """A process that registers, does `then`, and hangs."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, name, str(folder), then], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long enough for a process that has no processor at first."""
    monkeypatch.setattr(stacks, "_WRITING_SECONDS", 2.0)
    monkeypatch.setattr(stacks, "_PAUSE_SECONDS", 2.0)
    monkeypatch.setattr(stacks, "_LONGEST_SECONDS", 60.0)


def test_running_and_stopped_processes_write_the_frame_that_they_hang_in_and_the_dead_are_called_gone(
    tmp_path: Path, patient: None
) -> None:
    processes = {name: start(name, tmp_path) for name in ("running-0", "stopped-1", "gone-2", "unasked-3")}
    try:
        processes["stopped-1"].send_signal(signal.SIGSTOP)
        processes["gone-2"].kill()
        processes["gone-2"].wait()
        while psutil.Process(processes["stopped-1"].pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        asked = ["running-0", "stopped-1", "gone-2"]
        states = collect_stacks(tmp_path, asked, why="the test asks")
        assert states == {"running-0": "running", "stopped-1": "stopped", "gone-2": "gone"}
        for name in ("running-0", "stopped-1"):
            said = (tmp_path / FOLDER / f"{name}.txt").read_text()
            _, _, stacks = said.partition(f"{name} ({states[name]}): the test asks\n")
            assert "in hanging_here" in stacks and "Nothing was written" not in stacks
        assert "hanging_here" not in (tmp_path / FOLDER / "unasked-3.txt").read_text()
        kill_process(tmp_path, "stopped-1")
        assert processes["stopped-1"].wait() == -signal.SIGKILL
        assert processes["running-0"].poll() is None
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


BLOCKED = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})"


def test_a_process_that_does_not_answer_is_said_to_be_silent(tmp_path: Path) -> None:
    process = start("rank-0", tmp_path, BLOCKED)
    try:
        assert collect_stacks(tmp_path, why="the test asks") == {"rank-0": "running"}
        assert "Nothing was written within 0.5 s" in (tmp_path / FOLDER / "rank-0.txt").read_text()
    finally:
        process.kill()
        process.communicate()


def test_children_that_can_answer_are_asked_with_their_parent_and_others_are_left_alone(tmp_path: Path) -> None:
    stacks = tmp_path / "child.txt"
    answers = f"import faulthandler, signal, time; f = open({str(stacks)!r}, 'w')"
    answers += "; faulthandler.register(signal.SIGRTMIN, file=f); print('up', flush=True); time.sleep(100)"
    silent = "import time; print('up', flush=True); time.sleep(100)"
    then = "import subprocess; children = [subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)"
    then += f" for code in ({answers!r}, {silent!r})]; [child.stdout.readline() for child in children]"
    process = start("generator-0", tmp_path, then)
    children = psutil.Process(process.pid).children()
    try:
        time.sleep(1.1)  # a younger child may not be what it will be
        collect_stacks(tmp_path, why="the test asks")
        while "File " not in stacks.read_text():
            time.sleep(0.01)
        assert [child.status() for child in children] == [psutil.STATUS_SLEEPING] * 2
    finally:
        for one in (process, *children):
            one.kill()
        process.communicate()
