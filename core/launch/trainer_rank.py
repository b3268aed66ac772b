"""The Ray actor of one trainer rank: a process, a log file and remote calls around the engines."""

from __future__ import annotations

import gc
import logging
import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import psutil
import ray
import torch
from ray import ObjectRef

from allocation import Device, ParallelLayout
from core.data.stored_batch import Arrays, InferencePass, RankBatch, Ref, StoredBatch, StoredFields, UpdatePass
from core.errors import first_line
from core.launch.remote import fetch, place
from core.monitoring.logs import log_to_file
from core.monitoring.metrics import TRAINER, TRAINER_GPU, peak_gib
from core.processes.meeting import Meeting, MeetingPoint, join_store
from core.processes.stacks import forget_modules
from core.weight_sync.push import SenderSettings, SendReport
from mcore_adapter.data.planner import Planner
from mcore_adapter.device import get_device
from mcore_adapter.memory.out_of_memory import is_out_of_memory
from mcore_adapter.settings import EngineModel
from rollout.bucket import FlatBucket
from rollout.inference.backend import WeightEndpoint
from rollout.inference.registry import TRANSPORTS
from tracing import spanned

if TYPE_CHECKING:
    from core.weight_sync.buckets import Sender
    from mcore_adapter.engine import MegatronEngine, Shard

logger = logging.getLogger(__name__)


@spanned(leave_out=("ping", "close_batch", "add_fields"))
class TrainerRank:
    """One process of the trainer's world. Every method is called on all ranks at once, in the same order.

    A plain class; TrainerGroup makes the Ray actor of it."""

    def __init__(self, name: str, log_file: str, rank: int, world: int, device: Device, threads: int, seed: int):
        log_to_file(name, log_file)
        torch.set_num_threads(threads)
        self._rank, self._world, self._seed, self._kind = rank, world, seed, device
        self._engines: dict[str, MegatronEngine] = {}
        self._sender: Sender | None = None
        self._scope = ExitStack()

    def rendezvous(self, host: str | None, port: int) -> MeetingPoint:
        """Return where the ranks meet: `host`, or this node's address if other nodes take part, and a free port of it
        (or `port`, when it is not 0). Raises OSError where that is in use."""
        at = host or ray.util.get_node_ip_address()
        self._meeting = Meeting(at, port, key=None if host else secrets.token_bytes(32))
        return self._meeting.point

    def start(self, layout: ParallelLayout, point: MeetingPoint, collective_seconds: float) -> None:
        """Join the process group; a collective of it that takes longer than so many seconds fails."""
        from mcore_adapter.parallel import initialize_parallel

        if point.key is not None:
            _use_interface_of_node()
        self._device = get_device(self._kind)
        self._scope.enter_context(self._device.activate())
        if self._rank == 0:
            store = self._meeting.store(self._world, timeout_seconds=collective_seconds)
        else:
            store = join_store(point, self._world, timeout_seconds=collective_seconds)
        self._parallel = initialize_parallel(
            layout,
            rank=self._rank,
            world_size=self._world,
            init_method=store,
            device=self._device,
            seed=self._seed,
            timeout_seconds=collective_seconds,
        )

    def build(self, engine: str, loaded: EngineModel) -> Planner:
        """Make an engine under a name, ready for its first update; return how it cuts batches. Raises MemoryError with
        the processes that hold the memory."""
        from mcore_adapter.engine import MegatronEngine

        try:
            self._engines[engine] = MegatronEngine(loaded, parallel=self._parallel, device=self._device)
            self._engines[engine].warm_up()
        except (RuntimeError, MemoryError) as e:
            if not is_out_of_memory(e):
                raise
            holders = self._device.memory_holders()
            raise MemoryError(f"out of memory in the initialisation of {engine}: {first_line(e)}. {holders}") from None
        forget_modules()
        if self._rank == 0:
            parts = ", ".join(f"{part}: {by}" for part, by in self._engines[engine].computed_by().items())
            logger.info("%s computes with %s", engine, parts)
        return self._engines[engine].planner

    def open_batch(self, batch: StoredBatch | ObjectRef[StoredBatch], group: str) -> None:
        """Run the next passes on this batch. Its pieces are fetched when the first pass needs them."""
        self._batch = RankBatch(cast("StoredBatch", batch), (group, self._parallel.dp_rank), self._fetch)

    def _fetch(self, refs: list[Ref]) -> list[Arrays]:
        """Return pieces of a batch, in the store's read-only memory."""
        return fetch(refs)

    def add_fields(self, fields: StoredFields | ObjectRef[StoredFields]) -> None:
        """Train on these fields of the batch."""
        self._batch.add_fields(cast("StoredFields", fields))

    def close_batch(self) -> None:
        """Free the memory of the batch."""
        del self._batch

    def train_step(self, update: UpdatePass) -> dict[str, float]:
        """Run one optimizer update; metrics as every rank sees them, and the memory of this one."""
        metrics = self._engines[update.engine].train_step(
            self._batch.minibatch(update.minibatch, update.engine, replay_routing=update.replay_routing),
            update.loss,
            max_tokens_per_mb=update.limits.max_tokens_per_mb,
            max_sequence_tokens=update.limits.max_sequence_tokens,
            temperature=update.temperature,
            with_entropy=update.with_entropy,
        )
        return metrics | self._memory()

    def _memory(self) -> dict[str, float]:
        """Return the peak of this process and, where it has one, of its GPU, in GiB."""
        if self._device.torch_device.type == "cpu":
            return {TRAINER: peak_gib()}
        return {TRAINER: peak_gib(), TRAINER_GPU: self._device.memory_stats()["peak_gib"]}

    def infer(self, inference: InferencePass) -> Ref | None:
        """Return (sequences, their log-probabilities, values or entropy end to end), or a reference to them, on ranks
        that have results."""
        engine, limits = self._engines[inference.engine], inference.limits
        batch = self._batch.whole(replay_routing=inference.replay_routing)
        if inference.kind == "values":
            of_kind = engine.values
        else:
            of_policy = engine.entropy if inference.kind == "entropy" else engine.logprobs
            of_kind = partial(of_policy, temperature=inference.temperature)
        return _stored(
            of_kind(batch, max_tokens_per_mb=limits.max_tokens_per_mb, max_sequence_tokens=limits.max_sequence_tokens)
        )

    def export_weights(self, engine: str, bucket_bytes: int) -> tuple[list[Ref], int]:
        """Put the buckets into the object store, on rank 0, and return their handles and how many bytes they hold;
        other ranks return nothing."""
        handles, num_bytes = [], 0
        for tensors in self._engines[engine].iter_hf_weights(bucket_bytes):
            if tensors:
                bucket = FlatBucket.of(tensors)
                handles.append(ray.put(bucket))
                num_bytes += bucket.num_bytes
        return handles, num_bytes

    def push_connect(self, plan: SenderSettings, servers: Sequence[WeightEndpoint], host: str | None) -> None:
        """Make this rank's sender and join the servers, which reach it at `host`, or at this node's address."""

        from core.weight_sync.buckets import make_sender

        self._receivers = TRANSPORTS[plan.type].receivers
        settings = replace(
            plan,
            rank=self._rank,
            world_size=self._world,
            device=str(self._device.torch_device),
            host=host or ray.util.get_node_ip_address(),
        )
        self._sender = make_sender(settings)
        self._sender.connect(servers)

    def push_prepare(self, engine: str, bucket_bytes: int, *, verify: bool) -> None:
        buckets = self._engines[engine].iter_hf_weights(bucket_bytes, to=self._receivers)
        self._connected.prepare(buckets, verify=verify)

    def push_send(self) -> SendReport | None:
        return self._connected.send()

    def push_close(self) -> None:
        """Leave the servers, if this rank has joined some."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    @property
    def _connected(self) -> Sender:
        assert self._sender is not None, "push_connect() comes first"
        return self._sender

    def offload(self, keep: str) -> None:
        """Leave the device to the generators: the weights of the engine `keep`, which the next push reads, stay there
        and nothing else."""
        for name, engine in self._engines.items():
            engine.offload(weights=name != keep)
        self._device.empty_cache()

    def reload(self) -> None:
        """Reverse offload()."""
        for engine in self._engines.values():
            engine.reload()

    def save_hf(self, engine: str, path: str, tokenizer_from: str) -> None:
        self._engines[engine].save_hf(path, tokenizer_from=tokenizer_from)

    def ping(self) -> None:
        """Return, to show that the rank responds."""

    def prepare_saves(self, engine: str) -> None:
        self._engines[engine].prepare_saves()

    def begin_save(self, engine: str, path: str) -> None:
        """Begin to save. Raises MemoryError. A single rank first tries again without what it can do without."""
        for last in (self._world > 1, True):
            try:
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


def _use_interface_of_node() -> None:
    """Let collectives of the CPU use the network interface of this node's address. torch takes that of the host's name,
    which is often the loopback address, and other nodes do not reach it. A value that is set wins."""
    address = ray.util.get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _stored(shard: Shard | None) -> Ref | None:
    if shard is None:
        return None
    result = (np.array(shard.sequences, np.int64), shard.values.float().cpu().numpy())
    return place(result, result)
