"""What the guard takes for a leftover in /dev/shm."""

import multiprocessing
import os
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from core.launch.watchdog import unused_shared_memory

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
