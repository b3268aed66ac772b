"""The trainer ranks of one parallel layout as the training loop calls them, and published weights in their place."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, TypeVar

import numpy as np
import ray
from ray import ObjectRef
from ray.exceptions import RayActorError
from safetensors.torch import load_file

from allocation import RoleAllocation
from core.data.stored_batch import Arrays, InferencePass, Ref, StoredBatch, StoredFields, UpdatePass
from core.errors import LaunchError
from core.launch.cluster import Cluster
from core.launch.remote import P, R, Remote, fetch, place
from core.launch.trainer_rank import TrainerRank
from core.monitoring.metrics import split_memory
from core.weight_sync.push import Deadline, SenderSettings, SendReport, call_all
from mcore_adapter.data.planner import Planner
from mcore_adapter.settings import EngineModel
from rollout.bucket import FlatBucket
from rollout.inference.backend import WeightEndpoint
from rollout.inference.gpus import device_names

if TYPE_CHECKING:
    from core.weight_sync.folder import Published

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAGE_LOCKING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""PYTORCH_CUDA_ALLOC_CONF of trainer ranks: several threads take the host memory of checkpoints."""


class TrainerGroup:
    """The ranks of one parallel layout; holds one or more engines ("actor", "critic", "ref"), each on all ranks."""

    rank_class: type[TrainerRank] = TrainerRank
    """What runs in the processes."""

    def __init__(self, cluster: Cluster, placed: RoleAllocation, *, name: str, port: int, threads: int, seed: int):
        self.name, self.layout = name, placed.layout
        world = len(placed.slots)
        self._names = [f"{name}-rank{rank}" for rank in range(world)]
        # NCCL_CUMEM_ENABLE must be equal in trainer and servers, or the first broadcast of weights hangs.
        env = {"OMP_NUM_THREADS": str(threads), "NCCL_CUMEM_ENABLE": "0"}
        if not os.environ.keys() & {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}:
            env["PYTORCH_CUDA_ALLOC_CONF"] = PAGE_LOCKING

        self._ranks = [
            Remote[TrainerRank](
                cluster.start_actor(
                    ray.remote(self.rank_class), self._names[rank], rank, world, placed.device, threads, seed,
                    node=slot.node, env={
                        **env,
                        "CUDA_VISIBLE_DEVICES": device_names([slot.gpu], allowed=cluster.gpus_allowed)
                        if placed.on_gpu else "",
                    },
                )
            )
            for rank, slot in enumerate(placed.slots)
        ]  # fmt: skip
        self._cluster = cluster
        meeting = [self._ranks[0].send(TrainerRank.rendezvous, cluster.host, port)]
        (point,) = cluster.gather_started(meeting, names=self._names[:1])
        limit = cluster.deadlines.collective_seconds
        self._starting = self._send(TrainerRank.start, self.layout, point, limit)
        self._pings: list[ObjectRef[None]] = []
        self._announced: list[ObjectRef[None]] = []
        self._planners: dict[str, Planner] = {}
        self.memory: dict[str, float] = {}
        """Peak of the ranks' processes and GPUs, the largest of each: metrics after the last train_step."""

    def _send(
        self, method: Callable[Concatenate[TrainerRank, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[ObjectRef[R]]:
        """Start a call on every rank; return the references of the results, in rank order."""
        return [rank.send(method, *args, **kwargs) for rank in self._ranks]

    def wait_started(self) -> None:
        """Return when every rank has joined the process group."""
        self._cluster.gather_started(self._starting, names=self._names)

    def _gather(
        self, calls: list[ObjectRef[T]], phase: str, *, push_seconds: float | None = None, logs_wait: bool = False
    ) -> list[T]:
        """Return results of a call on every rank, in rank order. `push_seconds`: the deadline of a push, which has its
        own."""
        announced, self._announced = self._announced, []
        both: list[Ref] = [*announced, *calls]
        limit, key = self._cluster.deadlines.of_call
        return self._cluster.waiter.gather(
            both,
            names=[*self._names * (len(announced) // len(self._names)), *self._names],
            phase=phase,
            timeout_seconds=push_seconds or limit,
            key="push.timeout_seconds" if push_seconds else f"deadlines.{key}",
            logs_waiting=logs_wait,
        )[len(announced) :]

    def call(self, method: Callable[Concatenate[TrainerRank, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Return the results of a method of every rank, in rank order."""
        return self._gather(self._send(method, *args, **kwargs), method.__name__)

    def raise_if_dead(self) -> None:
        """Raise LaunchError when a rank has exited. Does not wait for those that are busy."""
        answered, self._pings = (
            ray.wait(self._pings, num_returns=len(self._pings), timeout=0) if self._pings else ([], [])
        )
        try:
            ray.get(answered)
        except RayActorError as e:
            raise LaunchError(f"a trainer rank exited while writing a checkpoint: {e}") from e
        if not self._pings:
            self._pings = self._send(TrainerRank.ping)

    def build(self, engine: str, loaded: EngineModel) -> None:
        """Make an engine under a name on all ranks."""
        calls = self._send(TrainerRank.build, engine, loaded)
        self._planners[engine] = self._gather(calls, f"build of {engine}", logs_wait=True)[0]

    def planner(self, engine: str) -> Planner:
        """Return how an engine that was built cuts batches."""
        return self._planners[engine]

    def put(self, value: T) -> ObjectRef[T]:
        """Place something in the object store for the ranks."""
        return ray.put(value)

    def place(self, arrays: Arrays) -> Ref:
        """Do the same with a piece of a batch that is not small."""
        return place(arrays, arrays.values())

    def get(self, results: Sequence[Ref]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return what the ranks have returned, from the store where it is there."""
        return fetch(results)

    def open_batch(self, batch: ObjectRef[StoredBatch]) -> None:
        """Run the next passes on this batch. The next call waits for it, and has its error."""
        self._announced += self._send(TrainerRank.open_batch, batch, self.name)

    def add_fields(self, fields: ObjectRef[StoredFields]) -> None:
        """Train on these fields of the batch; see open_batch()."""
        self._announced += self._send(TrainerRank.add_fields, fields)

    def close_batch(self) -> None:
        """Free the memory of the batch; see open_batch()."""
        self._announced += self._send(TrainerRank.close_batch)

    def train_step(self, update: UpdatePass) -> dict[str, float]:
        """Run one optimizer update; metrics as every rank sees them. Keeps the ranks' memory in `memory`."""
        calls = self._send(TrainerRank.train_step, update)
        metrics, self.memory = split_memory(self._gather(calls, f"train_step of {update.engine}"))
        return metrics

    def infer(self, inference: InferencePass) -> list[Ref]:
        """Return the results for the batch, or references to them, of each rank that has some: see TrainerRank."""
        calls = self._send(TrainerRank.infer, inference)
        return [ref for ref in self._gather(calls, f"{inference.kind} of {inference.engine}") if ref is not None]

    def export_weights(self, engine: str, bucket_bytes: int, timeout_seconds: float) -> tuple[list[Ref], int]:
        """Return the engine's weights as object-store handles of buckets, full tensors under Hugging Face names; and
        bytes."""
        calls = self._send(TrainerRank.export_weights, engine, bucket_bytes)
        return self._gather(calls, f"export_weights of {engine}", push_seconds=timeout_seconds)[0]

    def push_connect(self, plan: SenderSettings, servers: Sequence[WeightEndpoint]) -> None:
        """Make a sender in every rank, and join the servers."""
        self.call(TrainerRank.push_connect, plan, servers, self._cluster.host)

    def push_prepare(self, engine: str, bucket_bytes: int, *, verify: bool, timeout_seconds: float) -> None:
        """Gather the first buckets of the engine's weights."""
        calls = self._send(TrainerRank.push_prepare, engine, bucket_bytes, verify=verify)
        self._gather(calls, f"push_prepare of {engine}", push_seconds=timeout_seconds)

    def push_send(self, timeout_seconds: float) -> SendReport:
        """Send what was prepared to every server."""
        report = self._gather(self._send(TrainerRank.push_send), "push_send", push_seconds=timeout_seconds)[0]
        assert report is not None, "the first rank reports"
        return report

    def push_close(self) -> None:
        """Leave the servers."""
        self.call(TrainerRank.push_close)

    def offload(self, keep: str) -> None:
        """Leave the device to the generators, but for the weights of the engine `keep`."""
        self.call(TrainerRank.offload, keep)

    def reload(self) -> None:
        """Undo offload()."""
        self.call(TrainerRank.reload)

    def save_hf(self, engine: str, path: str, tokenizer_from: str) -> None:
        """Write a Hugging Face folder."""
        self.call(TrainerRank.save_hf, engine, path, tokenizer_from)

    def load(self, engine: str, path: str) -> None:
        """Continue from a checkpoint."""
        self._gather(self._send(TrainerRank.load, engine, path), f"load of {engine}", logs_wait=True)


class PublishedWeights:
    """Published weights in the place of the trainer's ranks: the Hugging Face folder of one version, which generators
    load. It implements `core.weight_sync.push.Trainer`."""

    def __init__(self) -> None:
        self.current: Published | None = None
        self._servers: Sequence[WeightEndpoint] = ()

    @property
    def _files(self) -> list[Path]:
        assert self.current is not None, "follow() claims a version first"
        if not (found := sorted(Path(self.current.where).glob("*.safetensors"))):
            raise FileNotFoundError(f"{self.current.where} has no weights (*.safetensors)")
        return found

    def export_weights(self, engine: str, bucket_bytes: int, timeout_seconds: float) -> tuple[list[Ref], int]:
        """Return the files as buckets in the object store, and their bytes."""
        placed, num_bytes = [], 0
        for file in self._files:  # one at a time in the memory of this process
            bucket = FlatBucket.of(load_file(file))
            placed.append(ray.put(bucket))
            num_bytes += bucket.num_bytes
        return placed, num_bytes

    def push_connect(self, plan: SenderSettings, servers: Sequence[WeightEndpoint]) -> None:
        """Send to these servers from now on."""
        self._servers = servers

    def push_prepare(self, engine: str, bucket_bytes: int, *, verify: bool, timeout_seconds: float) -> None:
        """Do nothing: the folder is written."""

    def push_send(self, timeout_seconds: float) -> SendReport:
        """Let every server load the folder. Raises PushError."""
        assert self.current is not None, "follow() claims a version first"
        began, where, files = time.perf_counter(), self.current.where, self._files
        deadline = Deadline(timeout_seconds)
        loading = call_all(
            self._servers, lambda server, left: server.load_folder(where, timeout_seconds=left), deadline
        )
        deadline.wait(loading, f"reading {where}")
        num_bytes = sum(file.stat().st_size for file in files)
        return SendReport(seconds=time.perf_counter() - began, num_bytes=num_bytes, num_buckets=len(files))

    def push_close(self) -> None:
        """Do nothing: a folder needs no connection."""

    def offload(self, keep: str) -> None:
        """Do nothing: there is no trainer on the GPUs of the generators."""

    def reload(self) -> None:
        """Do nothing, as offload()."""
