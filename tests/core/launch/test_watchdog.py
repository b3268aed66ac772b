"""What the guard takes for a leftover in /dev/shm."""

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil

from core.launch.watchdog import state_of, unused_shared_memory

SHARED_MEMORY = Path("/dev/shm")


def test_what_a_living_process_uses_is_no_leftover() -> None:
    """A semaphore is made under another name than it has in the end, and mapped under that."""
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    segment = SharedMemory(create=True, size=64)
    leftover = SHARED_MEMORY / f"psm_nobody-{os.getpid()}"
    leftover.touch()
    try:
        used = {SHARED_MEMORY / f"sem.{semaphore._semlock.name.removeprefix('/')}", SHARED_MEMORY / segment.name}
        assert all(path.exists() for path in used)
        unused = unused_shared_memory()
        assert leftover in unused and not used & unused
    finally:
        leftover.unlink()
        segment.close()
        segment.unlink()


def test_a_process_that_is_stopped_does_not_run() -> None:
    """A stopped raylet answers as little as one that has exited."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as started:
        process = psutil.Process(started.pid)
        assert state_of(process) == ""
        process.send_signal(signal.SIGSTOP)
        while process.status() != psutil.STATUS_STOPPED:
            pass
        assert state_of(process).endswith(f"(process {started.pid}) is stopped (SIGSTOP)")
        process.send_signal(signal.SIGCONT)
        while process.status() == psutil.STATUS_STOPPED:
            pass
        assert state_of(process) == ""
        process.kill()
    assert state_of(process) == f"process {started.pid} has exited"
