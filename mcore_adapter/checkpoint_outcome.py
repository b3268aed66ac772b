"""How whoever asked for a checkpoint in the background learns what came of it: a file beside its folder.

No torch here: the driver waits, the ranks write.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

LOOK_EVERY_SECONDS = 0.01
ASK_EVERY_SECONDS = 1.0


def tell_outcome(path: Path, error: str | None) -> None:
    """The checkpoint in the folder `path` is complete, or failed with `error`."""
    put_whole(_outcome_file(path), json.dumps({"error": error}).encode())


def wait_for_outcome(path: Path, stop: threading.Event, raise_if_dead: Callable[[], None] = lambda: None) -> None:
    """Return when the checkpoint in the folder `path` is complete, or when `stop` is set. Raises OSError when it
    failed, and what `raise_if_dead`, called once a second, says of those who write it."""
    outcome = _outcome_file(path)
    asked = time.monotonic()
    while not outcome.exists():
        if stop.wait(LOOK_EVERY_SECONDS):
            return
        if time.monotonic() - asked > ASK_EVERY_SECONDS:
            raise_if_dead()
            asked = time.monotonic()
    error = json.loads(outcome.read_bytes())["error"]
    outcome.unlink()
    if error is not None:
        raise OSError(error)


def put_whole(path: Path, content: bytes) -> None:
    """The file appears with all of its content; not at all where its folder is gone."""
    temporary = path.with_name(f".{path.name}.unfinished")
    try:
        temporary.write_bytes(content)
        os.rename(temporary, path)
    except FileNotFoundError:
        return


def _outcome_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.outcome")
