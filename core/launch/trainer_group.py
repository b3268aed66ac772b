"""The trainer ranks of one parallel layout as the training loop calls them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import RayActorError

from allocation import RoleAllocation, Slot
from core.data.wire import batch_to_wire
from core.errors import LaunchError
from core.launch.cluster import Cluster
from core.launch.trainer_rank import TrainerRank
from rollout.inference.gpus import device_names

if TYPE_CHECKING:
    from mcore_adapter.data.batch import PackedBatch
    from mcore_adapter.engine import LossFn

logger = logging.getLogger(__name__)

_CALLS_OF_A_START = ("build", "load")
"""Those that take long where a model is large, and nothing else tells that they go on."""

PAGE_LOCKING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""PYTORCH_CUDA_ALLOC_CONF of trainer ranks: several threads take the host memory of checkpoints."""


class TrainerGroup:
    """The ranks of one parallel layout; holds one or more engines ("actor", "critic", "ref"), each on all ranks."""

    def __init__(self, cluster: Cluster, placed: RoleAllocation, *, name: str, port: int, threads: int, seed: int):
        self.layout = placed.layout
        world = len(placed.slots)
        self._names = [f"{name}-rank{rank}" for rank in range(world)]
        # The second: as in the servers; with unequal settings the first broadcast of weights to them hangs its sender.
        env = {"OMP_NUM_THREADS": str(threads), "NCCL_CUMEM_ENABLE": "0"}
        if not os.environ.keys() & {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}:
            env["PYTORCH_CUDA_ALLOC_CONF"] = PAGE_LOCKING

        def gpu_of(slot: Slot) -> str:
            return device_names([slot.gpu], allowed=cluster.gpus_allowed) if placed.on_gpu else ""

        self._ranks = [
            cluster.start_actor(
                TrainerRank, self._names[rank], rank, world, placed.device, threads, seed,
                node=slot.node, env={**env, "CUDA_VISIBLE_DEVICES": gpu_of(slot)},
            )
            for rank, slot in enumerate(placed.slots)
        ]  # fmt: skip
        self._cluster = cluster
        meeting = [self._ranks[0].rendezvous.remote(port)]
        (address,) = cluster.gather_started(meeting, names=self._names[:1], timeout_seconds=cluster.startup_seconds)
        limit = cluster.deadlines.collective_seconds
        self._starting = [rank.start.remote(self.layout, address, limit) for rank in self._ranks]
        self._pings: list[Any] = []

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
        answered, self._pings = (
            ray.wait(self._pings, num_returns=len(self._pings), timeout=0) if self._pings else ([], [])
        )
        try:
            ray.get(answered)
        except RayActorError as e:
            raise LaunchError(f"a trainer rank exited while writing a checkpoint: {e}") from e
        if not self._pings:
            self._pings = [rank.ping.remote() for rank in self._ranks]

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
