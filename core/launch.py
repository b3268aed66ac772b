"""Ray: starts or joins a cluster, places one actor per rank of the device map, and takes them all away again.

With core/launch_actors.py this is the only place that knows Ray. What the loop sees are the three clients below
(`TrainerGroup`, `GeneratorPool`, `RolloutClient`): plain objects with blocking calls.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from allocation import Allocation, RoleAllocation
from core.errors import LaunchError
from core.launch_actors import GeneratorActor, RolloutActor, TrainerRank, batch_to_wire
from core.launch_guard import start_guard
from core.launch_signals import Interrupts, raise_if_interrupted
from core.push_buckets import PushError
from core.push_servers import beside_trainer
from rollout.router import NoGeneratorError
from rollout.sglang_server import ServerStartError
from rollout.sglang_weights import ServerError, ServerGone

if TYPE_CHECKING:
    from core.batch import RolloutBatch
    from core.losses import LossFn
    from mcore_adapter.batch import PackedBatch
    from rollout.sglang_weights import ServerAddress

logger = logging.getLogger(__name__)

_LOOK_EVERY_SECONDS = 1.0  # for a signal, while workers are waited for


class Cluster(AbstractContextManager["Cluster"]):
    """A Ray cluster of our own (or a joined one) with everything this run put on it.

    Leaving the context kills the run's actors and, if the cluster is ours, the cluster: by process id, never by name.
    """

    def __init__(self, *, ray_address: str | None, num_actors: int, startup_timeout_seconds: float, log_folder: Path):
        self._address = ray_address or os.environ.get("RAY_ADDRESS")
        self._num_actors = num_actors
        self._timeout = startup_timeout_seconds
        self.log_folder = log_folder
        self._actors: list[Any] = []
        self._groups: list[PlacementGroup] = []

    def __enter__(self) -> Cluster:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Ray would run its workers, which here do all the work, at the lowest priority of the machine.
        os.environ.setdefault("RAY_worker_niceness", "0")
        common: dict[str, Any] = {
            "namespace": f"slipstream-{os.getpid()}",
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "runtime_env": {
                "env_vars": {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
            },
        }
        self._guard = start_guard()
        try:
            if self._address is None:
                ray.init(address="local", num_cpus=self._num_actors, include_dashboard=False, **common)
            else:
                _check_reachable(self._address)
                ray.init(address=self._address, **common)
        except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as e:
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

    def __exit__(self, *exc_info: object) -> None:
        self._interrupts.__exit__(*exc_info)
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        for group in self._groups:
            remove_placement_group(group)
        self._end()

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
        if not group.wait(self._timeout):
            raise LaunchError(
                f"Ray did not grant {bundles} within launch.startup_timeout_seconds={self._timeout:g}; "
                f"the cluster has {ray.cluster_resources()}"
            )

    def start_actor(
        self, actor_class: Any, name: str, *args: object, node: int = 0, env: Mapping[str, str] = {}
    ) -> Any:
        """Create one actor on the bundle of `node`, writing to {log_folder}/{name}.log."""
        actor = actor_class.options(
            name=name,
            num_cpus=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._groups[0], placement_group_bundle_index=node),
            runtime_env={"env_vars": dict(env)},
        ).remote(name, str(self.log_folder / f"{name}.log"), *args)
        self._actors.append(actor)
        return actor


def _check_reachable(address: str) -> None:
    """Fail at once on a dead cluster; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=5).close()


def gather(refs: Sequence[Any], *, names: Sequence[str], timeout_seconds: float | None = None) -> list[Any]:
    """Results of `refs` in order; the first failure ends the wait.

    Raises LaunchError when a worker, or a server of its, died or did not answer in time; otherwise the worker's own
    exception, with a note that names the worker and holds its traceback."""
    by_ref = dict(zip(refs, names, strict=True))
    pending = list(refs)
    deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
    results: dict[Any, Any] = {}
    while pending:
        raise_if_interrupted()
        left = max(0.0, deadline - time.monotonic())
        ready, pending = ray.wait(pending, num_returns=1, timeout=min(left, _LOOK_EVERY_SECONDS))
        if not ready and left > 0:
            continue
        if not ready:
            raise LaunchError(f"no answer within {timeout_seconds:g} s from {', '.join(by_ref[r] for r in pending)}")
        try:
            results[ready[0]] = ray.get(ready[0])
        except RayTaskError as e:
            failure = as_driver_sees(e, worker=by_ref[ready[0]])
            raise failure from (e if isinstance(failure, LaunchError) else None)
        except (RayActorError, GetTimeoutError) as e:
            raise LaunchError(f"{by_ref[ready[0]]} died: {e}") from e
    return [results[r] for r in refs]


def as_driver_sees(error: RayTaskError, *, worker: str) -> Exception:
    """What a call on `worker` raised: LaunchError where new processes may do better, else its own exception."""
    cause = error.cause if isinstance(error.cause, Exception) else error
    if isinstance(cause, NoGeneratorError):
        return LaunchError(f"{worker} lost every generator: {cause}")
    # A server that is gone, or weights that did not arrive: the servers may hold old and new ones mixed. The messages
    # name the server.
    if isinstance(cause, PushError | ServerError | ServerGone | ServerStartError):
        return LaunchError(str(cause))
    cause.add_note(f"in {worker}:\n{error}")
    return cause


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
        self._ranks = [
            cluster.start_actor(
                TrainerRank, self._names[rank], rank, world, gpus, threads, seed,
                node=slot.node, env={**env, "CUDA_VISIBLE_DEVICES": str(slot.gpu) if gpus else ""},
            )
            for rank, slot in enumerate(placed.slots)
        ]  # fmt: skip
        address = gather([self._ranks[0].rendezvous.remote(port)], names=self._names[:1])[0]
        self._starting = [rank.start.remote(self.layout, address) for rank in self._ranks]

    def wait_started(self, timeout_seconds: float) -> None:
        """Return when every rank has joined the process group."""
        gather(self._starting, names=self._names, timeout_seconds=timeout_seconds)

    def call(self, method: str, *args: object, **kwargs: object) -> list[Any]:
        """The same call on every rank; results in rank order."""
        return gather([getattr(r, method).remote(*args, **kwargs) for r in self._ranks], names=self._names)

    def put(self, batch: PackedBatch) -> Any:
        """Place a batch in the object store; every other method takes the handle."""
        return ray.put(batch_to_wire(batch))

    def train_step(self, engine: str, batch: Any, sequences: Sequence[int], loss_fn: LossFn, **kwargs: object) -> dict:
        """One optimizer update on these sequences of the batch; metrics as every rank sees them."""
        return self.call("train_step", engine, batch, list(sequences), loss_fn, **kwargs)[0]

    def per_token(self, method: str, engine: str, batch: PackedBatch, handle: Any, **kwargs: object) -> torch.Tensor:
        """`method` ("logprobs" or "values") of an engine for every token of the batch: [T] float32."""
        out = torch.zeros(batch.num_tokens)
        for shard in self.call(method, engine, handle, **kwargs):
            if shard is not None:
                sequences, values = shard
                out[batch.token_index(sequences)] = torch.from_numpy(values.copy())
        return out

    def export_weights(self, engine: str, bucket_bytes: int) -> tuple[list[Any], int]:
        """The engine's weights as object-store handles of buckets, full tensors under Hugging Face names; and bytes."""
        return self.call("export_weights", engine, bucket_bytes)[0]


class GeneratorPool:
    """All generator replicas: where weights go. Requests reach them from the rollout actor."""

    def __init__(self, cluster: Cluster, placed: RoleAllocation, *, gpus: bool, threads: int, **settings: object):
        """`settings`: what the actor's backend is made from, the same for every replica."""
        self._placed = placed
        settings |= {"tp": placed.layout.tp, "pp": placed.layout.pp}
        self._names = [f"generator-{i}" for i in range(len(placed.replicas))]
        self.actors = [
            cluster.start_actor(
                GeneratorActor, name, placed.backend, threads,
                {**settings, "gpus": tuple(s.gpu for s in slots) if gpus else ()},
                node=slots[0].node, env={"OMP_NUM_THREADS": str(threads)},
            )
            for name, slots in zip(self._names, placed.replicas, strict=True)
        ]  # fmt: skip
        self._starting = [actor.start.remote() for actor in self.actors]

    def wait_started(self, timeout_seconds: float) -> None:
        """Return when every replica is ready for weights."""
        gather(self._starting, names=self._names, timeout_seconds=timeout_seconds)

    def receive(self, buckets: Sequence[Any], version: int, timeout_seconds: float) -> list[float]:
        """Give every replica the buckets; returns how long each one stopped sampling, in seconds."""
        return self._everywhere("receive", timeout_seconds, list(buckets), version)

    def addresses(self, trainer: RoleAllocation) -> list[ServerAddress]:
        """The servers, each with the trainer's ranks on its GPUs."""
        return beside_trainer(self._everywhere("address", None), self._placed, trainer)

    def pause(self, timeout_seconds: float) -> None:
        """Return when no replica samples."""
        self._everywhere("pause", timeout_seconds)

    def resume(self, version: int, timeout_seconds: float) -> list[float]:
        """Go on with this version; returns how long each replica stopped sampling, in seconds."""
        return self._everywhere("resume", timeout_seconds, version)

    def release_memory(self, tags: Sequence[str], timeout_seconds: float) -> None:
        """Give device memory back, while paused; see SGLangGenerator."""
        self._everywhere("release_memory", timeout_seconds, list(tags))

    def resume_memory(self, tags: Sequence[str], timeout_seconds: float) -> None:
        """Take it again."""
        self._everywhere("resume_memory", timeout_seconds, list(tags))

    def close(self) -> None:
        """End every replica."""
        self._everywhere("close", None)

    def _everywhere(self, method: str, timeout_seconds: float | None, *args: object) -> list[Any]:
        refs = [getattr(actor, method).remote(*args) for actor in self.actors]
        return gather(refs, names=self._names, timeout_seconds=timeout_seconds)


class RolloutClient:
    """The rollout actor (data set, producer, buffer, rewards) as the loop sees it."""

    def __init__(self, cluster: Cluster, generators: GeneratorPool, settings: Mapping[str, object]):
        self._actor = cluster.start_actor(RolloutActor, "rollout", generators.actors, dict(settings))
        self._starting = self._actor.start.remote()

    def wait_started(self, timeout_seconds: float) -> dict[str, Any]:
        """Facts about the data set: num_prompts, mean_prompt_tokens."""
        return gather([self._starting], names=["rollout"], timeout_seconds=timeout_seconds)[0]

    def _call(self, method: str, *args: object) -> Any:
        return gather([getattr(self._actor, method).remote(*args)], names=["rollout"])[0]

    def take(self, version: int) -> tuple[RolloutBatch, dict[str, float]]:
        """The next batch, oldest first, and the producer's figures; waits until the staleness bound can be kept."""
        return self._call("take", version)

    def begin(self, version: int, state: object | None) -> None:
        """Start sampling, from the beginning or from a recover checkpoint's state."""
        self._call("begin", version, state)

    def set_version(self, version: int) -> None:
        """The generators now sample with this version: admit what it allows."""
        self._call("set_version", version)

    def state_dict(self) -> object:
        return self._call("state_dict")

    def evaluate(self) -> dict[str, float]:
        """Accuracy and completion length over the evaluation set."""
        return self._call("evaluate")

    def close(self) -> None:
        self._call("close")
