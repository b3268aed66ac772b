"""The connection to Ray: a cluster of this run's own, which listens on this machine alone, or one that is joined.

As a program (a JoinedCluster as JSON on stdin) it prints the resources of each node as JSON, or exits with a message on
stderr.

Ray 2.60 guards clusters with a token where it finds one (~/.ray/auth_token, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH), but
requires RAY_AUTH_MODE=token from processes that join by address. Here the cluster determines the mode.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import ray_constants
from ray.exceptions import AuthenticationError, RayError
from ray.job_config import JobConfig

from core.errors import LaunchError, first_line
from core.launch.remote import without_unused_processes
from core.placement.allocation import AUTO, STARTED, JoinedCluster, connection_error
from core.processes.watchdog import ray_folder
from rollout.plugins import ROOT

logger = logging.getLogger(__name__)

_raylet: Any = ray._raylet  # type: ignore[attr-defined]  # without stubs
_AUTH_MODE = "RAY_AUTH_MODE"
_LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""0: Ray takes the loopback address for this node's, and its processes listen nowhere else."""
_WAYS_OUT = (
    "start it with `ray start --head`, or write launch.ray_address=local: the run then starts a cluster of its own"
)
_TOKEN = "~/.ray/auth_token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"


class OwnPackagesFirst(JobConfig):
    """The configuration of a job whose workers import this checkout, as the driver does.

    Ray puts the working folder of the driver before everything on the path of workers, PYTHONPATH included: a package
    named core or tools there would hide Slipstream's.
    """

    def _serialize(self) -> str:
        # A worker inserts one after the other at the front of its path.
        others = [folder for folder in self._py_driver_sys_path if folder != str(ROOT)]
        self._py_driver_sys_path = [*others, str(ROOT)]
        return super()._serialize()


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a driver asks of Ray, whichever the cluster."""

    namespace: str | None = None
    runtime_env: dict[str, object] | None = None
    logging_level: int = logging.ERROR


def start_own(options: Options, *, num_cpus: int, num_gpus: int | None) -> None:
    """Start a Ray cluster on this machine that listens on the loopback address only. Raises LaunchError."""
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[_LOOPBACK_ONLY] = "0"
    try:
        with without_unused_processes():
            ray.init(
                address="local", num_cpus=num_cpus, num_gpus=num_gpus, include_dashboard=False, log_to_driver=False,
                _temp_dir=ray_folder(), job_config=OwnPackagesFirst(), namespace=options.namespace,
                runtime_env=options.runtime_env, logging_level=options.logging_level,
            )  # fmt: skip
    except Exception as e:  # noqa: BLE001 - Ray raises bare Exceptions where its processes do not come up
        raise LaunchError(f"Ray could not be started on this machine: {type(e).__name__}: {e}") from e
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = True
        del os.environ[_LOOPBACK_ONLY]


def join(cluster: JoinedCluster, options: Options) -> None:
    """Connect to a Ray cluster that runs. Raises LaunchError: the message differs between a cluster that does not
    respond, one that requires a token which is missing here, and one that refuses the token."""
    address = cluster.address
    if address is None:
        raise LaunchError(f"{cluster}: no Ray cluster was started on this node with `ray start`; {_WAYS_OUT}")
    if why := connection_error(cluster):
        raise LaunchError(f"{cluster}: Ray does not respond: {why}; {_WAYS_OUT}")
    if cluster.source == STARTED or cluster.given == AUTO:
        logger.info("Joining the Ray cluster at %s (%s).", cluster.address, cluster.source)
    try:
        if cluster.host_and_port is not None and not address.startswith("ray://"):
            _use_token_if_required(cluster)
        own = None if address.startswith("ray://") else OwnPackagesFirst()  # a client cannot send it
        ray.init(
            address=address, log_to_driver=False, namespace=options.namespace, runtime_env=options.runtime_env,
            logging_level=options.logging_level, job_config=own,  # type: ignore[arg-type]  # as by default
        )  # fmt: skip
    except LaunchError:
        raise
    except Exception as e:  # noqa: BLE001 - as in start_own()
        raise LaunchError(f"{cluster}: Ray does not respond: {type(e).__name__}: {first_line(e)}; {_WAYS_OUT}") from e


def _use_token_if_required(cluster: JoinedCluster) -> None:
    """Set RAY_AUTH_MODE=token if the cluster requires it. Raises LaunchError where it is given, or required, without a
    token: Ray would abort this process."""
    is_given = os.environ.get(_AUTH_MODE, "").lower() == "token"
    if not is_given and not _requires_token(cluster):
        return
    if not _raylet.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        raise LaunchError(_refusal(cluster, f"there is none here ({_TOKEN})"))
    os.environ[_AUTH_MODE] = "token"
    _raylet.Config.initialize("")  # Ray has read the variable already
    if _requires_token(cluster):
        raise LaunchError(_refusal(cluster, f"the one here ({_TOKEN}) is another"))


def _requires_token(cluster: JoinedCluster) -> bool:
    """Return whether the cluster refuses this process for its token or for the lack of one."""
    with suppress(RayError):  # anything else is found by ray.init
        try:
            _raylet.GcsClient(address=cluster.address)
        except AuthenticationError:
            return True
    return False


def _refusal(cluster: JoinedCluster, why: str) -> str:
    return (
        f"{cluster}: Ray responds, but requires its authentication token, and {why}; copy ~/.ray/auth_token of the "
        "node that ran `ray start --head` to this one, with mode 0600"
    )


def _print_nodes() -> None:
    """Print the resources of every node of the cluster that stdin names."""
    try:
        join(JoinedCluster(**json.load(sys.stdin)), Options(logging_level=logging.CRITICAL))
    except LaunchError as error:
        sys.exit(str(error))
    json.dump([node["Resources"] for node in ray.nodes() if node["Alive"]], sys.stdout)
    ray.shutdown()


if __name__ == "__main__":
    _print_nodes()
