"""The processes that Ray starts on this machine for one run."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray


@contextmanager
def without_unused_processes() -> Iterator[None]:
    """Start Ray here without three Python processes of the head node: a run never requests more machines, its workers
    write their own log files, and no dashboard is served.

    `ray start` has options for the autoscaler and the log monitor (--no-monitor, --include-log-monitor); ray.init has
    not. include_dashboard=False leaves the dashboard's process, which then reports usage statistics only.
    """
    parameter: Any = ray._private.parameter
    services: Any = ray._private.services
    params, start_api_server = parameter.RayParams, services.start_api_server
    parameter.RayParams = functools.partial(params, no_monitor=True, include_log_monitor=False)
    services.start_api_server = lambda *args, **options: (None, None)
    try:
        yield
    finally:
        parameter.RayParams, services.start_api_server = params, start_api_server
