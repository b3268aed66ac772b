"""Files through which the ranks that write a checkpoint report its outcome to the process that waits for it.

Without torch and Megatron: the driver waits. Invariant: a report appears with all of its content, or not at all.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

LOOK_EVERY_SECONDS = 0.01
CHECK_EVERY_SECONDS = 1.0


def tell_outcome(path: Path, error: Exception | None) -> None:
    """Record that the checkpoint in the folder `path` is complete, or that it failed with `error`."""
    message = None if error is None else str(error) or type(error).__name__
    put_whole(_outcome_file(path), json.dumps({"error": message, "of_disk": isinstance(error, OSError)}).encode())


def wait_for_outcome(path: Path, stop: threading.Event, raise_if_dead: Callable[[], None] = lambda: None) -> None:
    """Return when the checkpoint in the folder `path` is complete, or when `stop` is set. Raises OSError when it could
    not be written, RuntimeError when it failed for another reason, and the error of `raise_if_dead`, called once a
    second, if a writer has exited."""
    outcome = _outcome_file(path)
    checked = time.monotonic()
    while not outcome.exists():
        if stop.wait(LOOK_EVERY_SECONDS):
            return
        if time.monotonic() - checked > CHECK_EVERY_SECONDS:
            raise_if_dead()
            checked = time.monotonic()
    found = json.loads(outcome.read_bytes())
    outcome.unlink()
    if found["error"] is not None:
        raise OSError(found["error"]) if found["of_disk"] else RuntimeError(found["error"])


def put_whole(path: Path, content: bytes) -> None:
    """Write a file with all of its content as soon as there is space for it; do not write it if its folder has been
    removed."""
    temporary = path.with_name(f".{path.name}.unfinished")
    while True:
        try:
            temporary.write_bytes(content)
            os.rename(temporary, path)
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(CHECK_EVERY_SECONDS)


def _outcome_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.outcome")
