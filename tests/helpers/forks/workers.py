"""Make a run start its Ray workers as forks of its driver, and Ray's agents as forks too: for command lines that
server.py forked.

The driver forks before it imports Ray, and what Ray runs in place of its `setup_worker.py` (ray_worker.py) requests the
workers from that fork. They are descendants of the driver, as they are in every run. The agents are forks of a server
that has imported Ray, which no worker can be: Ray reads the job of a worker from its environment when it is imported.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.processes import supervise
from helpers.forks.ray_worker import ADDRESS
from helpers.forks.server import fork_server

_run_attempts = supervise.run_attempts


def run_attempts(run: Callable[[Any], int], **options: Any) -> int:
    """In place of core.processes.supervise.run_attempts."""

    def warm(attempt: Any) -> int:
        _prepare()
        return run(attempt)

    return _run_attempts(warm, **options)


def _prepare() -> None:
    address = f"slipstream-workers-{os.getpid()}"
    fork_server(address)
    os.environ[ADDRESS] = address
    import ray

    parameter: Any = ray._private.parameter
    services: Any = ray._private.services
    script = str(Path(__file__).with_name("ray_worker.py"))
    parameter.RayParams = functools.partial(parameter.RayParams, setup_worker_path=script)
    python = services._build_python_executable_command_memory_profileable
    services._build_python_executable_command_memory_profileable = lambda *of, **how: [*python(*of, **how), script]


supervise.run_attempts = run_attempts
