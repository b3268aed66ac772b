"""Let an agent of Ray end with its raylet, which is not its parent: for agents that server.py forked.

Ray is installed without what the modules of its dashboard need: an agent looks for them, and finds none.
"""

import asyncio
import logging
import os
from typing import Any

from ray import _raylet
from ray._private import process_watcher
from ray.dashboard import utils


def _end_with_raylet(log_dir: str, gcs_client: Any, on_end: Any, loop: asyncio.AbstractEventLoop) -> asyncio.Task[None]:
    """In place of ray._private.process_watcher.create_check_raylet_task."""
    loop.add_reader(os.pidfd_open(int(os.environ["RAY_RAYLET_PID"])), os._exit, 0)
    return loop.create_task(asyncio.sleep(0))


process_watcher.create_check_raylet_task = _end_with_raylet
utils.get_all_modules = lambda kind: []
logging.getLogger().handlers.clear()
_raylet.Config.initialize("")  # Ray has read the environment of the server
