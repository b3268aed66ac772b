"""Ray: starts or joins a cluster, places one actor per rank of the device map, and takes them all away again.

With its neighbours core/launch_*.py this is the only place that knows Ray. What the loop sees are the clients
(`TrainerGroup` and `RolloutClient` here, `GeneratorPool`): plain objects with blocking calls.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from allocation import Allocation, RoleAllocation, Slot
from core.config.push import SHARED_MEMORY_NAMES
from core.data.wire import batch_to_wire
from core.errors import LaunchError, first_line
from core.launch.actors import RolloutActor, TrainerRank
from core.launch.wait import Waiter
from core.launch.watchdog import start_guard
from core.processes.signals import Interrupts
from core.processes.stacks import ask_for_stacks
from rollout.inference.sglang.gpus import ALLOWED, allowed_gpus, device_names, query_gpus

if TYPE_CHECKING:
    from core.algorithms.losses import LossFn
    from core.config.runtime import DeadlineConfig
    from core.data.rollout_batch import RolloutBatch
    from core.launch.generators import GeneratorPool
    from mcore_adapter.data.batch import PackedBatch

logger = logging.getLogger(__name__)

_NODES_SECONDS = 10.0
"""For other machines to have the stacks of their processes written."""

_CALLS_OF_A_START = ("build", "load")
"""Those that take long where a model is large, and nothing else tells that they go on."""

PAGE_LOCKING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""PYTORCH_CUDA_ALLOC_CONF of trainer ranks: several threads take the host memory of checkpoints."""


class Cluster(AbstractContextManager["Cluster"]):
    """A Ray cluster of our own (or a joined one) with everything this run put on it.

    Leaving the context kills the run's actors and, if the cluster is ours, the cluster: by process id, never by name.
    """

    def __init__(
        self,
        *,
        ray_address: str | None,
        num_actors: int,
        startup_timeout_seconds: float,
        deadlines: DeadlineConfig,
        log_folder: Path,
    ):
        self._address = ray_address or os.environ.get("RAY_ADDRESS")
        self.gpus_allowed = "all" if self._address else allowed_gpus()
        """CUDA_VISIBLE_DEVICES as this program got it; it says nothing of the machines of a cluster that was there."""
        self._num_actors = num_actors
        self.startup_seconds = startup_timeout_seconds
        self.deadlines = deadlines
        self.log_folder = log_folder
        self.waiter = Waiter(log_folder)
        self._actors: list[Any] = []
        self._groups: list[PlacementGroup] = []

    def __enter__(self) -> Cluster:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Ray would run its workers, which here do all the work, at the lowest priority of the machine.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Workers that Ray starts before it knows for what have not our environment, and are never used.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        # Ray would keep a record of each of the last 100,000 calls: memory that grows for 10,000 steps.
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        common: dict[str, Any] = {
            "namespace": f"slipstream-{os.getpid()}",
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "runtime_env": {
                "env_vars": {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
            },
        }
        self._guard = start_guard(SHARED_MEMORY_NAMES)
        try:
            if self._address is None:
                # Ray counts by itself where all GPUs may be used.
                gpus = None if self.gpus_allowed == "all" else len(query_gpus())
                ray.init(address="local", num_cpus=self._num_actors, num_gpus=gpus, include_dashboard=False, **common)
            else:
                _check_reachable(self._address)
                ray.init(address=self._address, **common)
        except Exception as e:  # noqa: BLE001 - Ray raises bare Exceptions where its processes do not come up
            self._end()
            raise LaunchError(
                f"launch.ray_address={self._address}: Ray does not answer there ({type(e).__name__}: {e}); start it "
                "with `ray start --head`, or unset launch.ray_address and RAY_ADDRESS: the run then starts its own"
                if self._address
                else f"Ray could not be started on this machine: {type(e).__name__}: {e}"
            ) from e
        # After ray.init, which puts a handler of its own there.
        self._interrupts = Interrupts()
        self._interrupts.__enter__()
        return self

    def __exit__(self, error_type: object, error: BaseException | None, *traceback: object) -> None:
        """Raises LaunchError in the place of an error of Ray's own, such as a full object store."""
        self._interrupts.__exit__(error_type, error, *traceback)
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        for group in self._groups:
            remove_placement_group(group)
        self._end()
        if isinstance(error, RayError) and not isinstance(error, RayTaskError):
            raise LaunchError(f"Ray: {type(error).__name__}: {first_line(error)}") from error

    def _end(self) -> None:
        ray.shutdown()
        self._guard.end()

    def reserve(self, allocation: Allocation, *, gpus: bool) -> None:
        """One bundle a node of the device map; actors are put on the bundle of their slot's node. Raises LaunchError
        when the cluster does not get the resources in time."""
        per_node = {
            node: sum(slot.node == node for role in allocation.roles.values() for slot in role.slots)
            for node in range(allocation.n_nodes)
        }
        bundles = [
            {"CPU": 1.0, **({"GPU": float(allocation.n_gpus_per_node)} if gpus and n else {})}
            for n in per_node.values()
        ]
        group = placement_group(bundles, strategy="STRICT_SPREAD" if gpus else "PACK")
        self._groups.append(group)
        if not group.wait(self.startup_seconds):
            raise LaunchError(
                f"Ray did not grant {bundles} within launch.startup_timeout_seconds={self.startup_seconds:g}; "
                f"the cluster has {ray.cluster_resources()}"
            )
        if allocation.n_nodes > 1:
            self.waiter.ask_also(self._ask_nodes)

    def _ask_nodes(self, why: str) -> dict[str, str]:
        """As ask_for_stacks, on every node; one that does not answer at once is passed over."""
        ask: Any = ray.remote(num_cpus=0)(ask_for_stacks)  # type: ignore[arg-type]
        refs = [
            ask.options(
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

    def gather_started(self, refs: Sequence[Any], *, names: Sequence[str], timeout_seconds: float) -> list[Any]:
        """Results of the calls that make workers ready."""
        key = "launch.startup_timeout_seconds"
        return self.waiter.gather(
            refs, names=names, phase="initialisation", timeout_seconds=timeout_seconds, key=key, tells=True
        )

    def start_actor(
        self, actor_class: Any, name: str, *args: object, node: int = 0, env: Mapping[str, str] = {}
    ) -> Any:
        """Create one actor on the bundle of `node`, writing to {log_folder}/{name}.log."""
        actor = actor_class.options(
            num_cpus=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._groups[0], placement_group_bundle_index=node),
            runtime_env={"env_vars": {ALLOWED: self.gpus_allowed, **env}},
        ).remote(name, str(self.log_folder / f"{name}.log"), *args)
        self._actors.append(actor)
        return actor


def _check_reachable(address: str) -> None:
    """Fail at once on a dead cluster; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=5).close()


class TrainerGroup:
    """The ranks of one parallel layout; holds one or more engines ("actor", "critic", "ref"), each on all ranks."""

    def __init__(
        self, cluster: Cluster, placed: RoleAllocation, *, name: str, gpus: bool, port: int, threads: int, seed: int
    ):
        self.layout = placed.layout
        world = len(placed.slots)
        self._names = [f"{name}-rank{rank}" for rank in range(world)]
        # The second: as in the servers; with unequal settings the first broadcast of weights to them hangs its sender.
        env = {"OMP_NUM_THREADS": str(threads), "NCCL_CUMEM_ENABLE": "0"}
        if not os.environ.keys() & {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}:
            env["PYTORCH_CUDA_ALLOC_CONF"] = PAGE_LOCKING

        def gpu_of(slot: Slot) -> str:
            return device_names([slot.gpu], allowed=cluster.gpus_allowed) if gpus else ""

        self._ranks = [
            cluster.start_actor(
                TrainerRank, self._names[rank], rank, world, gpus, threads, seed,
                node=slot.node, env={**env, "CUDA_VISIBLE_DEVICES": gpu_of(slot)},
            )
            for rank, slot in enumerate(placed.slots)
        ]  # fmt: skip
        self._cluster = cluster
        meeting = [self._ranks[0].rendezvous.remote(port)]
        (address,) = cluster.gather_started(meeting, names=self._names[:1], timeout_seconds=cluster.startup_seconds)
        limit = cluster.deadlines.collective_seconds
        self._starting = [rank.start.remote(self.layout, address, limit) for rank in self._ranks]
        self._pulse: list[Any] = []

    def wait_started(self, timeout_seconds: float) -> None:
        """Return when every rank has joined the process group."""
        self._cluster.gather_started(self._starting, names=self._names, timeout_seconds=timeout_seconds)

    def call(self, method: str, *args: object, timeout_seconds: float | None = None, **kwargs: Any) -> list[Any]:
        """The same call on every rank; results in rank order. `timeout_seconds`: of a push, which has its own."""
        return self._cluster.waiter.gather(
            [getattr(r, method).remote(*args, **kwargs) for r in self._ranks],
            names=self._names,
            phase=f"{method} of {args[0]}" if args and isinstance(args[0], str) else method,
            timeout_seconds=timeout_seconds or self._cluster.deadlines.call_seconds,
            key="push.timeout_seconds" if timeout_seconds else "deadlines.call_seconds",
            tells=method in _CALLS_OF_A_START,
        )

    def raise_if_dead(self) -> None:
        """Raises LaunchError when a rank is gone. Does not wait for those that are busy."""
        answered, self._pulse = (
            ray.wait(self._pulse, num_returns=len(self._pulse), timeout=0) if self._pulse else ([], [])
        )
        try:
            ray.get(answered)
        except RayActorError as e:
            raise LaunchError(f"a trainer rank died while it wrote a checkpoint: {e}") from e
        if not self._pulse:
            self._pulse = [rank.pulse.remote() for rank in self._ranks]

    def put(self, batch: PackedBatch) -> Any:
        """Place a batch in the object store; every other method takes the handle."""
        return ray.put(batch_to_wire(batch))

    def train_step(self, engine: str, batch: Any, sequences: Sequence[int], loss_fn: LossFn, **kwargs: Any) -> dict:
        """One optimizer update on these sequences of the batch; metrics as every rank sees them."""
        return self.call("train_step", engine, batch, list(sequences), loss_fn, **kwargs)[0]

    def per_token(self, method: str, engine: str, batch: PackedBatch, handle: Any, **kwargs: Any) -> torch.Tensor:
        """`method` ("logprobs" or "values") of an engine for every token of the batch: [T] float32."""
        out = torch.zeros(batch.num_tokens)
        for shard in self.call(method, engine, handle, **kwargs):
            if shard is not None:
                sequences, values = shard
                out[batch.token_index(sequences)] = torch.from_numpy(values.copy())
        return out

    def export_weights(self, engine: str, bucket_bytes: int, timeout_seconds: float) -> tuple[list[Any], int]:
        """The engine's weights as object-store handles of buckets, full tensors under Hugging Face names; and bytes."""
        return self.call("export_weights", engine, bucket_bytes, timeout_seconds=timeout_seconds)[0]


class RolloutClient:
    """The rollout actor (data set, producer, buffer, rewards) as the loop sees it."""

    def __init__(self, cluster: Cluster, generators: GeneratorPool, settings: Mapping[str, object]):
        self._cluster = cluster
        self._actor = cluster.start_actor(RolloutActor, "rollout", generators.actors, dict(settings))
        self._starting = self._actor.start.remote()
        self._announced: list[Any] = []

    def wait_started(self, timeout_seconds: float) -> dict[str, Any]:
        """Facts about the data set: num_prompts, mean_prompt_tokens."""
        return self._cluster.gather_started([self._starting], names=["rollout"], timeout_seconds=timeout_seconds)[0]

    def _call(self, method: str, *args: object) -> Any:
        return self._wait(method, *args, timeout_seconds=self._cluster.deadlines.call_seconds, key="call_seconds")

    def _sampling(self, method: str, *args: object, meanwhile: Callable[[], None]) -> Any:
        """A call that waits for generators."""
        limit = self._cluster.deadlines.batch_seconds
        return self._wait(method, *args, timeout_seconds=limit, key="batch_seconds", meanwhile=meanwhile)

    def _wait(self, method: str, *args: object, timeout_seconds: float, key: str, **options: Any) -> Any:
        calls = [*self._announced, getattr(self._actor, method).remote(*args)]
        self._announced = []
        return self._cluster.waiter.gather(
            calls,
            names=["rollout"] * len(calls),
            phase=method,
            timeout_seconds=timeout_seconds,
            key=f"deadlines.{key}",
            **options,
        )[-1]

    def take(self, version: int, meanwhile: Callable[[], None]) -> tuple[RolloutBatch, dict[str, float]]:
        """The next batch, oldest first, and the producer's figures; waits until the staleness bound can be kept, and
        calls `meanwhile` about once a second."""
        return self._sampling("take", version, meanwhile=meanwhile)

    def begin(self, version: int, state: object | None, *, ignore_changes: bool) -> None:
        """Start sampling, from the beginning or from a recover checkpoint's state."""
        self._call("begin", version, state, ignore_changes)

    def set_version(self, version: int) -> None:
        """The generators now sample with this version: admit what it allows. The next call waits for it, and has its
        error: the trainer need not."""
        self._announced.append(self._actor.set_version.remote(version))

    def state_dict(self) -> object:
        return self._call("state_dict")

    def evaluate(self, meanwhile: Callable[[], None]) -> dict[str, float]:
        """Accuracy and completion length over the evaluation set. `meanwhile`: see take()."""
        return self._sampling("evaluate", meanwhile=meanwhile)

    def lost_generators(self) -> dict[int, str]:
        """Those that the rollout side has given up, by index, with the reason."""
        return self._call("lost_generators")

    def replace_generator(self, index: int, actor: Any) -> None:
        """Requests may go to this one from now on, in place of one that is dead."""
        self._call("replace_generator", index, actor)

    def close(self) -> None:
        self._call("close")
