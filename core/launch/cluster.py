"""Ray: starts or joins a cluster, places one actor per rank of the device map, and takes them all away again.

As a program (a JoinedCluster as JSON on stdin) it prints the resources of each node as JSON, or exits with a message on
stderr.

Ray 2.60 guards clusters with a token where it finds one (~/.ray/auth_token, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH), but
requires RAY_AUTH_MODE=token from processes that join by address. Here the cluster determines the mode.

Only the files of this folder import Ray. The training loop uses the clients (`TrainerGroup`, `RolloutClient`,
`GeneratorPool`): plain objects with blocking calls.
"""

import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import ray
from ray import ObjectRef
from ray._private import ray_constants
from ray.actor import ActorHandle
from ray.exceptions import AuthenticationError, RayError, RayTaskError
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import tracing
from allocation import Allocation
from core.config.runtime import DeadlineConfig
from core.errors import LaunchError, first_line
from core.launch.remote import Waiter, without_unused_processes
from core.monitoring.logs import WorkerWarnings, worker_environment
from core.placement import AUTO, STARTED, JoinedCluster, connection_error
from core.processes.meeting import LOOPBACK
from core.processes.signals import Interrupts, begin_shutdown
from core.processes.stacks import collect_stacks
from core.processes.watchdog import ray_folder, start_watchdog
from rollout.inference.gpus import ALLOWED, allowed_gpus, query_gpus
from rollout.inference.registry import SHARED_MEMORY_NAMES
from rollout.plugins import ROOT, python_path

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


T = TypeVar("T")

_LOOPBACK_INTERFACE = "lo"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_NODES_SECONDS = 10.0
"""For other machines to have the stacks of their processes written."""
_KEPT_BYTES = {"MALLOC_MMAP_THRESHOLD_": 2**25, "MALLOC_TRIM_THRESHOLD_": 2**28}
"""Blocks up to the first size, its maximum, come from the heap, which keeps up to the second that is free."""


class Cluster(AbstractContextManager["Cluster"]):
    """A Ray cluster of our own (or a joined one) with everything this run put on it.

    Leaving the context kills the run's actors and, if the cluster is ours, the cluster: by process id, never by name.
    """

    def __init__(
        self,
        *,
        joined: JoinedCluster | None,
        envs: Mapping[str, str],
        num_actors: int,
        startup_timeout_seconds: float,
        deadlines: DeadlineConfig,
        log_folder: Path,
        before_end: Sequence[Callable[[], None]] = (),
    ):
        """`joined`: a cluster that runs; None: start one on this machine. `envs`: external_configs.envs, for every
        worker on every node; those that this process has keep their value. `before_end`: called before the
        processes that this one has started are killed."""
        self._before_end = before_end
        self._joined = joined
        self.gpus_allowed = "all" if joined else allowed_gpus()
        """CUDA_VISIBLE_DEVICES as this program got it; it does not apply to the machines of an existing cluster."""
        self.host: str | None = None
        """Address at which the run's processes reach each other; None: that of each one's node. See reserve()."""
        self._envs = {name: os.environ.get(name, value) for name, value in envs.items()}
        self._num_actors = num_actors
        self.startup_seconds = startup_timeout_seconds
        self.deadlines = deadlines
        self.log_folder = log_folder
        self.waiter = Waiter(log_folder)
        self._show_warnings = WorkerWarnings(log_folder)
        self.waiter.every_second(self._show_warnings)
        self._actors: list[ActorHandle] = []
        self._groups: list[PlacementGroup] = []

    def __enter__(self) -> Self:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Ray would run its workers, which here do all the work, at the lowest priority of the machine.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Workers that Ray starts ahead lack our environment, and are never used.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        # Ray would keep a record of each of the last 100,000 calls: memory that grows for 10,000 steps.
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        env_vars = {**self._envs, "PYTHONPATH": python_path()}
        common = Options(namespace=f"slipstream-{os.getpid()}", runtime_env={"env_vars": env_vars})
        self._guard = start_watchdog(SHARED_MEMORY_NAMES)
        self._interrupts = Interrupts()
        self._interrupts.__enter__()
        try:
            if self._joined is None:
                # Ray counts by itself where all GPUs may be used.
                gpus = None if self.gpus_allowed == "all" else len(query_gpus())
                start_own(common, num_cpus=self._num_actors, num_gpus=gpus)
            else:
                join(self._joined, common)
        except BaseException as error:
            self._interrupts.install_again()  # ray.init has installed a handler of SIGTERM
            self._end()
            if isinstance(error, SystemExit):  # by that handler
                raise KeyboardInterrupt("signal SIGTERM") from error
            raise
        self._interrupts.install_again()
        return self

    def __exit__(self, error_type: object, error: BaseException | None, *traceback: object) -> None:
        """Disconnect from Ray. Raises LaunchError in place of Ray's own errors, such as a full object store."""
        begin_shutdown()
        try:
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
            for group in self._groups:
                remove_placement_group(group)
        finally:
            self._end()
        self._show_warnings()  # those of the last second
        if isinstance(error, RayError) and not isinstance(error, RayTaskError):
            raise LaunchError(f"Ray: {type(error).__name__}: {first_line(error)}") from error

    def _end(self) -> None:
        """End Ray and the watchdog, which ends what is left; a signal interrupts neither, unless Ray hangs."""
        begin_shutdown()
        try:
            for call in self._before_end:
                call()
            ray.shutdown()
        finally:
            self._interrupts.install_again()  # Ray has taken the handler of SIGTERM away
            begin_shutdown()
            self._guard.end()
            self._interrupts.__exit__()

    def reserve(self, allocation: Allocation) -> None:
        """Reserve one bundle per node of the device map, with the GPUs that roles compute on; actors are placed on the
        bundle of their slot's node. All on one machine, they listen on the loopback address. Raises LaunchError when
        the cluster does not get the resources in time."""
        gpus = allocation.gpu_slots
        per_node = [sum(slot.node == node for slot in gpus) for node in range(allocation.n_nodes)]
        bundles = [{"CPU": 1.0, **({"GPU": float(n)} if n else {})} for n in per_node]
        group = placement_group(bundles, strategy="STRICT_SPREAD" if gpus else "PACK")
        self._groups.append(group)
        if not group.wait(self.startup_seconds):
            raise LaunchError(
                f"Ray did not grant {bundles} within launch.startup_timeout_seconds={self.startup_seconds:g}; "
                f"the cluster has {ray.cluster_resources()}"
            )
        if allocation.n_nodes > 1 and self._joined:
            self.waiter.ask_nodes = self._ask_nodes
        else:  # one bundle, or bundles of a cluster that is this machine alone
            self.host = LOOPBACK

    @property
    def address(self) -> str:
        """The address at which other processes reach this one."""
        return self.host or ray.util.get_node_ip_address()

    def _ask_nodes(self, why: str) -> dict[str, str]:
        """Request stacks as collect_stacks, on every node; one that does not answer at once is skipped."""
        collect: Any = ray.remote(num_cpus=0)(collect_stacks)  # type: ignore[arg-type]
        refs = [
            collect.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._groups[0], placement_group_bundle_index=node)
            ).remote(self.log_folder, why=why)
            for node in range(self._groups[0].bundle_count)
        ]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_NODES_SECONDS)
        states: dict[str, str] = {}
        for ref in ready:
            with contextlib.suppress(RayError):
                states |= ray.get(ref)
        return states

    def gather_started(self, refs: Sequence[ObjectRef[T]], *, names: Sequence[str]) -> list[T]:
        """Return the results of the calls that make workers ready, within launch.startup_timeout_seconds."""
        key, limit = "launch.startup_timeout_seconds", self.startup_seconds
        return self.waiter.gather(
            refs, names=names, phase="initialisation", timeout_seconds=limit, key=key, logs_waiting=True
        )

    def start_actor(
        self, actor_class: Any, name: str, *args: object, node: int = 0, env: Mapping[str, str] = {}
    ) -> ActorHandle:
        """Create one actor on the bundle of `node`, writing to {log_folder}/{name}.log."""
        actor = actor_class.options(
            num_cpus=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._groups[0], placement_group_bundle_index=node),
            runtime_env={
                "env_vars": {
                    ALLOWED: self.gpus_allowed,
                    **self._kept_memory(),
                    **worker_environment(),
                    **tracing.worker_environment(),
                    **self._interfaces(),
                    **env,
                }
            },
        ).remote(name, str(self.log_folder / f"{name}.log"), *args)
        self._actors.append(actor)
        return actor

    def _interfaces(self) -> dict[str, str]:
        """Return the variables that keep collectives of one machine on its loopback interface; the user's win."""
        if self.host is None or _LOOPBACK_INTERFACE not in (name for _, name in socket.if_nameindex()):
            return {}
        return {name: os.environ.get(name, _LOOPBACK_INTERFACE) for name in _INTERFACES}

    def _kept_memory(self) -> dict[str, str]:
        """Return the variables with which glibc keeps tensors' memory for the next ones; the user's win. It would give
        larger blocks back at once, and the system fills each page anew: up to a tenth of an update on CPU."""
        return {name: self._envs.get(name, os.environ.get(name, str(size))) for name, size in _KEPT_BYTES.items()}


if __name__ == "__main__":
    _print_nodes()
