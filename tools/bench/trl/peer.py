"""Run the script of TRL in its own environment."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

SCRIPT = Path(__file__).with_name("script.py")
END_SECONDS = 10.0
"""A process that is ended while it uses a GPU can stay for minutes; it is not waited for longer."""


def output_of(command: list[str], limit: float) -> str:
    """Return what a command prints; after `limit` seconds end it and what it has started. Its standard error is ours.

    Raises subprocess.CalledProcessError, subprocess.TimeoutExpired.
    """
    # With LOCAL_RANK, which benchmarks on a GPU set for their engine, accelerate expects a distributed run.
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=limit)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return output
