"""The Ray actors: one trainer rank, one generator replica, the rollout side. Each is a thin shell: it gives the object
that does the work a process, a log file and a way to be called.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import random
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch

from allocation.strain import strain
from core.data.wire import batch_from_wire, bucket_from_wire, bucket_to_wire
from core.errors import first_line
from core.monitoring.logs import log_to_file
from core.processes.stacks import forget_modules
from rollout.types import Completion, GenerateRequest, Generator, Health, WeightBucket

if TYPE_CHECKING:
    from allocation import ParallelLayout
    from core.algorithms.losses import LossFn
    from core.weight_sync.buckets import Sender, SendReport
    from core.weight_sync.servers import SenderPlan
    from mcore_adapter.engine import EngineSettings, MegatronEngine, OptimizerSettings
    from rollout.inference.sglang.weights import ServerAddress

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

    def __init__(self, name: str, log_file: str, rank: int, world: int, gpus: bool, threads: int, seed: int):
        log_to_file(name, log_file)
        torch.set_num_threads(threads)
        self._rank, self._world, self._seed, self._gpus = rank, world, seed, gpus
        self._engines: dict[str, MegatronEngine] = {}
        self._scope = ExitStack()

    def rendezvous(self, port: int) -> str:
        """Where the ranks meet: this node's address and a free port of it (or `port`, when it is not 0)."""
        host = ray.util.get_node_ip_address()
        return f"tcp://{host}:{port or _free_port(host)}"

    def start(self, layout: ParallelLayout, init_method: str, collective_seconds: float) -> None:
        """Join the process group; a collective of it that takes longer than so many seconds fails."""
        from mcore_adapter.quick_import import import_megatron

        import_megatron()
        from mcore_adapter.device import get_device
        from mcore_adapter.parallel import initialize_parallel

        self._device = get_device("auto" if self._gpus else "cpu")
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

    def push_connect(self, plan: SenderPlan, servers: Sequence[ServerAddress]) -> None:
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

    def pulse(self) -> None:
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
            logger.warning("%s; trying again with caches given back", failure)
            gc.collect()
            self._device.empty_cache()
            shutil.rmtree(path, ignore_errors=True)

    def load(self, engine: str, path: str) -> None:
        self._engines[engine].load(path)


@ray.remote
class GeneratorActor:
    """One generator replica."""

    def __init__(self, name: str, log_file: str, backend: str, threads: int, settings: dict[str, Any]):
        log_to_file(name, log_file)
        torch.set_num_threads(threads)
        self._name, self._log_file, self._backend, self._settings = name, log_file, backend, settings
        self._receiving = asyncio.Lock()
        self._handed_out: dict[str, Completion | Exception] = {}

    async def start(self) -> None:
        if self._backend == "mock":
            from rollout.inference.mock.generator import MockGenerator

            self._generator: Any = MockGenerator(
                self._settings["model_path"], seconds_per_token=self._settings["mock_seconds_per_token"]
            )
        elif self._backend == "sglang":
            self._generator = await self._start_server()
        else:
            from rollout.inference.embedded import EmbeddedGenerator

            # The first push brings the weights, before anything is asked of it.
            config = json.loads((Path(self._settings["model_path"]) / "config.json").read_text(encoding="utf-8"))
            self._generator = EmbeddedGenerator(
                config,
                max_running=self._settings["max_running"],
                interrupt=self._settings["interrupt"],
                dtype=self._settings["dtype"],
            )
        forget_modules()

    async def _start_server(self) -> Any:
        """Raises ValueError where the GPUs are missing or in use, ServerStartError with the server's last log lines."""
        from rollout.inference.sglang.generator import SGLangGenerator
        from rollout.inference.sglang.server import ServerSettings

        settings = ServerSettings(
            name=self._name,
            model_path=self._settings["model_path"],
            log_file=Path(self._log_file).with_suffix(".server.log"),
            gpus=self._settings["gpus"],
            tp=self._settings["tp"],
            pp=self._settings["pp"],
            dtype=self._settings["dtype"],
            max_running=self._settings["max_running"],
            colocated=self._settings["colocated"],
            tells_experts=self._settings["tells_experts"],
            flags=self._settings["sglang"],
            host=ray.util.get_node_ip_address(),
            python=self._settings["sglang_python"] or sys.executable,
            startup_timeout_seconds=self._settings["startup_timeout_seconds"],
        )
        return await SGLangGenerator.start(settings, interrupt=self._settings["interrupt"])

    async def submit(self, requests: list[GenerateRequest]) -> None:
        self._generator.submit(requests)

    async def drain(self) -> list[tuple[str, Completion | Exception]]:
        """What has ended since the last call; an exception concerns its request alone."""
        self._handed_out = dict(await self._generator.drain())
        return list(self._handed_out.items())

    async def receive(self, handles: list[Any], version: int) -> float:
        """Fetch the buckets first, then stop for no longer than the copy takes. Returns the pause in seconds."""
        wires = await asyncio.gather(*handles)
        buckets = [bucket_from_wire(wire) for wire in wires]
        async with self._receiving:  # a push is repeated when another generator has died in it
            start = time.perf_counter()
            await self._generator.pause()
            for bucket in buckets:
                await self._generator.update_weights(bucket)
            await self._generator.resume(version)
            return time.perf_counter() - start

    def address(self) -> ServerAddress:
        """Of the SGLang server."""
        return self._generator.address

    async def pause(self) -> None:
        self._paused_at = time.perf_counter()
        await self._generator.pause()

    async def update_weights(self, wire: dict[str, Any]) -> None:
        await self._generator.update_weights(bucket_from_wire(wire))

    async def resume(self, version: int) -> float:
        """Seconds since pause()."""
        await self._generator.resume(version)
        return time.perf_counter() - self._paused_at

    async def release_memory(self, tags: list[str]) -> None:
        await self._generator.release_memory(tags)

    async def resume_memory(self, tags: list[str]) -> None:
        await self._generator.resume_memory(tags)

    async def close(self) -> None:
        """End the server, if there is one; killing this process would end it half a second later."""
        await self._generator.close()

    async def health(self) -> Health:
        return await self._generator.health()

    async def partial(self) -> dict[str, Completion]:
        """What requests in flight have, and what the last drain() answered, which may still be on its way."""
        running = await self._generator.partial()
        return {name: end for name, end in self._handed_out.items() if isinstance(end, Completion)} | running


class ActorGenerator(Generator):
    """A generator replica in another process. Requests of one turn of the event loop travel together, and so do the
    completions that are ready: two calls a batch, whatever its size."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._outbox: list[GenerateRequest] = []
        self._pending: dict[str, asyncio.Future[Completion]] = {}
        self._pump: asyncio.Task[None] | None = None
        self._flushing: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._pending[request.request_id] = future
        if not self._outbox:
            self._flushing = loop.create_task(self._flush())
        self._outbox.append(request)
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._receive())
        return await future

    async def _flush(self) -> None:
        """Hand over what came in this turn. Requests that are refused fail, all that came together."""
        requests, self._outbox = self._outbox, []
        try:
            await self._actor.submit.remote(requests)
        except ray.exceptions.RayTaskError as refusal:
            for request in requests:
                future = self._pending.pop(request.request_id, None)
                if future is not None and not future.done():
                    future.set_exception(refusal.cause if isinstance(refusal.cause, Exception) else refusal)

    async def _receive(self) -> None:
        try:
            while self._pending:
                for request_id, outcome in await self._actor.drain.remote():
                    future = self._pending.pop(request_id, None)
                    if future is None or future.done():
                        continue
                    if isinstance(outcome, Exception):
                        future.set_exception(outcome)
                    else:
                        future.set_result(outcome)
        except ray.exceptions.RayTaskError as failure:  # its process lives and says what is wrong with all of them
            self._fail_pending(failure.cause if isinstance(failure.cause, Exception) else failure)
        except ray.exceptions.RayError as e:
            self._fail_pending(ConnectionError(f"the generator's process is gone: {e}"))

    def _fail_pending(self, error: Exception) -> None:
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(error)

    async def pause(self) -> None:
        await self._actor.pause.remote()

    async def update_weights(self, bucket: WeightBucket) -> None:
        await self._actor.update_weights.remote(bucket_to_wire(dict(bucket.tensors)))

    async def resume(self, version: int) -> None:
        await self._actor.resume.remote(version)

    async def health(self) -> Health:
        return await self._actor.health.remote()

    async def partial(self) -> dict[str, Completion]:
        return await self._actor.partial.remote()

    async def close(self) -> None:
        if self._pump is not None:
            self._pump.cancel()


@ray.remote
class RolloutActor:
    """The rollout side: data set, producer, buffer and rewards, in one event loop."""

    def __init__(self, name: str, log_file: str, generators: Sequence[Any], settings: dict[str, Any]):
        log_to_file(name, log_file)
        torch.set_num_threads(1)
        self._generators, self._settings = generators, settings

    async def start(self) -> dict[str, Any]:
        from core.rollout_service import RolloutService

        self._service = RolloutService([ActorGenerator(a) for a in self._generators], **self._settings)
        await self._service.start()
        forget_modules()
        return self._service.describe()

    async def begin(self, version: int, state: Any, ignore_changes: bool) -> None:
        await self._service.begin(version, state, ignore_changes=ignore_changes)

    async def take(self, version: int) -> Any:
        return await self._service.take(version)

    async def set_version(self, version: int) -> None:
        self._service.set_version(version)

    async def lost_generators(self) -> dict[int, str]:
        """Those that do not answer here, with the reason."""
        return self._service.router.lost()

    async def replace_generator(self, index: int, actor: Any) -> None:
        """A generator came back as another process, with the weights of the current version."""
        self._service.router.replace(index, ActorGenerator(actor))

    async def evaluate(self) -> dict[str, float]:
        return await self._service.evaluate()

    async def state_dict(self) -> Any:
        return await self._service.state_dict()

    async def close(self) -> None:
        await self._service.close()
