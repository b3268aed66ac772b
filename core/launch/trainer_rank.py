"""The Ray actor of one trainer rank: a process, a log file and remote calls around the engines."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import shutil
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch

from allocation.strain import strain
from core.data.wire import batch_from_wire, bucket_to_wire
from core.errors import first_line
from core.monitoring.logs import log_to_file
from core.processes.stacks import forget_modules

if TYPE_CHECKING:
    from allocation import Device, ParallelLayout
    from core.weight_sync.buckets import Sender, SendReport
    from core.weight_sync.servers import SenderPlan
    from mcore_adapter.engine import EngineSettings, LossFn, MegatronEngine, OptimizerSettings
    from rollout.inference.backend import WeightEndpoint

logger = logging.getLogger(__name__)


def _free_port(host: str) -> int:
    """A free port below those that the system hands out: nobody is given it before the ranks listen there."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind((host, port))
            return port
    raise OSError("none of 100 ports between 20000 and 32000 is free; set launch.master_port")


@ray.remote
class TrainerRank:
    """One process of the trainer's world. Every method is called on all ranks at once, in the same order."""

    def __init__(self, name: str, log_file: str, rank: int, world: int, device: Device, threads: int, seed: int):
        log_to_file(name, log_file)
        torch.set_num_threads(threads)
        self._rank, self._world, self._seed, self._kind = rank, world, seed, device
        self._engines: dict[str, MegatronEngine] = {}
        self._scope = ExitStack()

    def rendezvous(self, port: int) -> str:
        """Where the ranks meet: this node's address and a free port of it (or `port`, when it is not 0)."""
        host = ray.util.get_node_ip_address()
        return f"tcp://{host}:{port or _free_port(host)}"

    def start(self, layout: ParallelLayout, init_method: str, collective_seconds: float) -> None:
        """Join the process group; a collective of it that takes longer than so many seconds fails."""
        from mcore_adapter.device import get_device
        from mcore_adapter.parallel import initialize_parallel

        self._device = get_device(self._kind)
        self._scope.enter_context(self._device.activate())
        self._parallel = initialize_parallel(
            layout,
            rank=self._rank,
            world_size=self._world,
            init_method=init_method,
            device=self._device,
            seed=self._seed,
            timeout_seconds=collective_seconds,
        )

    def build(self, engine: str, settings: EngineSettings, optimizer: OptimizerSettings | None) -> None:
        """Make an engine under a name. Raises MemoryError, which names who holds the memory."""
        from mcore_adapter.engine import MegatronEngine
        from mcore_adapter.out_of_memory import is_out_of_memory

        try:
            strain("init", rank=self._rank)
            self._engines[engine] = MegatronEngine(
                parallel=self._parallel, device=self._device, settings=settings, optimizer=optimizer
            )
        except (RuntimeError, MemoryError) as e:
            if not is_out_of_memory(e):
                raise
            holders = self._device.memory_holders()
            raise MemoryError(f"out of memory in the initialisation of {engine}: {first_line(e)}. {holders}") from None
        forget_modules()

    def train_step(
        self, engine: str, wire: dict[str, Any], sequences: list[int], loss_fn: LossFn, **kwargs: Any
    ) -> dict[str, float]:
        batch = batch_from_wire(wire)
        if len(sequences) != batch.num_sequences:
            batch = batch.select(sequences)
        return self._engines[engine].train_step(batch, loss_fn, **kwargs)

    def logprobs(self, engine: str, wire: dict[str, Any], **kwargs: Any) -> tuple[list[int], np.ndarray] | None:
        shard = self._engines[engine].logprobs(batch_from_wire(wire), **kwargs)
        return None if shard is None else (shard.sequences, shard.values.float().cpu().numpy())

    def values(self, engine: str, wire: dict[str, Any], **kwargs: Any) -> tuple[list[int], np.ndarray] | None:
        shard = self._engines[engine].values(batch_from_wire(wire), **kwargs)
        return None if shard is None else (shard.sequences, shard.values.float().cpu().numpy())

    def export_weights(self, engine: str, bucket_bytes: int) -> tuple[list[Any], int]:
        """Rank 0 puts the buckets into the object store and returns their handles and how many bytes they hold; the
        others return nothing."""
        handles, num_bytes = [], 0
        for tensors in self._engines[engine].iter_hf_weights(bucket_bytes):
            if tensors:
                wire = bucket_to_wire(tensors)
                handles.append(ray.put(wire))
                num_bytes += wire["bytes"].nbytes
        return handles, num_bytes

    def push_connect(self, plan: SenderPlan, servers: Sequence[WeightEndpoint]) -> None:
        """Make this rank's sender and join the servers."""
        from core.weight_sync.servers import make_sender

        self._sender: Sender = make_sender(
            plan, rank=self._rank, world_size=self._world, device=self._device.torch_device,
            host=ray.util.get_node_ip_address(),
        )  # fmt: skip
        self._sender.connect(servers)

    def push_prepare(self, engine: str, bucket_bytes: int, *, verify: bool) -> None:
        self._sender.prepare(self._engines[engine].iter_hf_weights(bucket_bytes), verify=verify)

    def push_send(self) -> SendReport | None:
        return self._sender.send()

    def push_close(self) -> None:
        self._sender.close()

    def offload(self) -> None:
        """Leave the device to the generators: every engine keeps its weights there and nothing else."""
        for engine in self._engines.values():
            engine.offload()
        self._device.empty_cache()

    def reload(self) -> None:
        """The inverse of offload()."""
        for engine in self._engines.values():
            engine.reload()

    def save_hf(self, engine: str, path: str, tokenizer_from: str) -> None:
        self._engines[engine].save_hf(path, tokenizer_from=tokenizer_from)

    def ping(self) -> None:
        """Answers."""

    def prepare_saves(self, engine: str) -> None:
        self._engines[engine].prepare_saves()

    def begin_save(self, engine: str, path: str) -> None:
        """Raises MemoryError. A single rank first tries again without what it can do without."""
        from mcore_adapter.out_of_memory import is_out_of_memory

        for last in (self._world > 1, True):
            try:
                strain("save", rank=self._rank)
                self._engines[engine].begin_save(path)
                return
            except (RuntimeError, MemoryError) as e:
                if not is_out_of_memory(e):
                    raise
                failure = f"out of memory in saving {engine}: {first_line(e)}"
            if last:
                raise MemoryError(failure)
            logger.warning("%s; trying again after emptying the caches", failure)
            gc.collect()
            self._device.empty_cache()
            shutil.rmtree(path, ignore_errors=True)

    def load(self, engine: str, path: str) -> None:
        self._engines[engine].load(path)
