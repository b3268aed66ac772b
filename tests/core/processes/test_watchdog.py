"""What the guard takes for a leftover in /dev/shm."""

import multiprocessing
import os
import queue
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from core.processes import watchdog
from core.processes.watchdog import state_of, unused_shared_memory

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


HOLDS_A_FILE = """
import mmap, sys, tempfile, time
input()
file = tempfile.NamedTemporaryFile(dir=sys.argv[1], prefix="psm_", delete=False)
file.truncate(64)
held = mmap.mmap(file.fileno(), 64)
print(file.name, flush=True)
time.sleep(600)
"""


def test_only_what_a_process_of_the_driver_was_seen_to_use_is_removed(tmp_path: Path, monkeypatch) -> None:
    """Processes of another container that shares /dev/shm are not to be seen: what they use looks unused."""
    monkeypatch.setattr(watchdog, "_SHARED_MEMORY", tmp_path)  # other tests look at what is unused in /dev/shm
    foreign = tmp_path / "psm_foreign"
    looks: queue.SimpleQueue[None] = queue.SimpleQueue()

    def select_and_count(*args: Any) -> Any:
        looks.put(None)
        return select.select(*args)

    reading, writing = os.pipe()
    monkeypatch.setattr(watchdog, "select", SimpleNamespace(select=select_and_count))
    monkeypatch.setattr(sys, "stdin", os.fdopen(reading))
    driver = subprocess.Popen(
        [sys.executable, "-c", HOLDS_A_FILE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with driver, ThreadPoolExecutor(1) as pool, os.fdopen(writing, "wb") as goodbye:
        watching = pool.submit(watchdog.watchdog, psutil.Process(driver.pid), ["psm_"])
        looks.get()
        foreign.touch()
        try:
            print(file=driver.stdin, flush=True)
            held = Path(driver.stdout.readline().strip())
            while not looks.empty():
                looks.get()
            looks.get()
            looks.get()  # a whole look since
            assert held.exists()
            driver.kill()
            driver.wait()  # until then it still maps the file
            goodbye.write(b"done")
            goodbye.close()
            assert watching.result() is True
            assert foreign.exists() and not held.exists()
        finally:
            driver.kill()


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
