"""The processes that Ray starts on this machine for one run."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray


@contextmanager
def without_autoscaler_and_log_monitor() -> Iterator[None]:
    """Start Ray here without two Python processes of the head node: a run never asks for more machines, and its workers
    write their own log files.

    `ray start` has these options (--no-monitor, --include-log-monitor); ray.init has not.
    """
    parameter: Any = ray._private.parameter
    params = parameter.RayParams
    parameter.RayParams = functools.partial(params, no_monitor=True, include_log_monitor=False)
    try:
        yield
    finally:
        parameter.RayParams = params
