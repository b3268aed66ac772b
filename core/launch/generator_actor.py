"""The Ray actor of one generator replica, and the replica as the rollout actor calls it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import ray
from ray.actor import ActorHandle

from core.launch.remote import Remote
from core.monitoring.logs import log_to_file
from core.processes.stacks import forget_modules
from rollout.experience.serial import records_from_plain, records_to_plain
from rollout.inference.backend import BackendSettings, ColocatedReplica, Replica, ServedReplica, WeightEndpoint
from rollout.inference.registry import BACKENDS
from rollout.inference.router import Routed
from rollout.types import Completion, GenerateRequest, Health
from tracing import spanned

if TYPE_CHECKING:
    from core.data.stored_batch import Ref
    from rollout.bucket import FlatBucket
    from rollout.inference.receiver import BroadcastReceiver

logger = logging.getLogger(__name__)


class Wire(TypedDict):
    """How requests have ended, as it travels between processes."""

    errors: list[tuple[str, Exception]]
    names: list[str]
    done: dict[str, object]


def completions_to_wire(ended: Sequence[tuple[str, Completion | Exception]]) -> Wire:
    """Convert how requests have ended, by request id."""
    done = [(name, end) for name, end in ended if isinstance(end, Completion)]
    return {
        "errors": [(name, end) for name, end in ended if isinstance(end, Exception)],
        "names": [name for name, _ in done],
        "done": records_to_plain([end for _, end in done]),
    }


def completions_from_wire(wire: Wire) -> list[tuple[str, Completion | Exception]]:
    """Return the inverse of `completions_to_wire`, errors first; arrays are views."""
    return [*wire["errors"], *zip(wire["names"], records_from_plain(Completion, wire["done"]), strict=True)]


@spanned(leave_out=("submit", "abort", "drain", "endpoint", "health", "partial"))
class GeneratorActor:
    """One generator replica. A plain class; GeneratorPool makes the Ray actor of it."""

    def __init__(self, name: str, log_file: str, backend: str, threads: int, settings: BackendSettings):
        log_to_file(name, log_file)
        self._backend = BACKENDS[backend]
        self._holds_weights = self._backend.capabilities.holds_weights
        if self._holds_weights:
            import torch

            torch.set_num_threads(threads)
        self._settings = replace(
            settings,
            name=name,
            log_file=Path(log_file).with_suffix(".server.log"),
            host=settings.host or ray.util.get_node_ip_address(),
        )
        self._receiving = asyncio.Lock()
        self._receiver: BroadcastReceiver | None = None
        """Of a backend without servers, in the group of a train job."""
        self._handed_out: dict[str, Completion | Exception] = {}

    async def start(self) -> None:
        """Start the replica. Raises as Backend.start."""
        self._generator: Replica = await self._backend.start(self._settings)
        forget_modules()

    async def submit(self, requests: list[GenerateRequest]) -> None:
        self._generator.submit(requests)

    async def abort(self, request_ids: list[str]) -> None:
        self._generator.abort(request_ids)

    async def drain(self) -> Wire:
        """Return what has ended since the last call, as completions_to_wire; an exception concerns its request
        alone."""
        ended = await self._generator.drain()
        self._handed_out = dict(ended)
        return completions_to_wire(list(self._handed_out.items()))  # of a repeated id, the last one

    async def receive(self, handles: list[Ref], version: int) -> float:
        """Fetch the buckets first, then stop for no longer than the copy takes. Returns the pause in seconds."""
        return await self._load(await asyncio.gather(*handles) if self._holds_weights else [], version)

    async def _load(self, buckets: Sequence[FlatBucket], version: int) -> float:
        async with self._receiving:  # a push is repeated when another generator has failed in it
            start = time.perf_counter()
            await self._generator.pause()
            for bucket in buckets:
                await self._generator.update_weights(bucket)
            await self._generator.resume(version)
            return time.perf_counter() - start

    async def endpoint(self) -> WeightEndpoint:
        """Return the endpoint of a replica whose weights do not come through receive()."""
        if "local" not in self._backend.capabilities.transports:
            return cast(ServedReplica, self._generator).endpoint
        from rollout.inference.receiver import BroadcastReceiver

        if self._receiver is None:
            assert self._settings.host is not None, "filled in by the constructor"
            self._receiver = BroadcastReceiver(
                self._settings.name, self._settings.host, timeout_seconds=self._settings.push_timeout_seconds
            )
            self._endpoint = await self._receiver.start()
        return self._endpoint

    async def pause(self) -> None:
        """Stop sampling; where buckets are kept until resume(), continue until then."""
        if self._receiver is not None:
            self._receiver.take()  # what an update has brought that failed
            return
        self._paused_at = time.perf_counter()
        await self._generator.pause()

    async def resume(self, version: int) -> float:
        """Resume sampling; return the seconds for which it had stopped."""
        if self._receiver is not None:
            return await self._load(self._receiver.take(), version)
        await self._generator.resume(version)
        return time.perf_counter() - self._paused_at

    async def release_memory(self, tags: list[str]) -> None:
        await cast(ColocatedReplica, self._generator).release_memory(tags)

    async def resume_memory(self, tags: list[str]) -> None:
        await cast(ColocatedReplica, self._generator).resume_memory(tags)

    async def close(self) -> None:
        """End the processes that the backend started; killing this one would end them half a second later."""
        await self._generator.close()

    async def health(self) -> Health:
        return await self._generator.health()

    async def partial(self) -> dict[str, Completion]:
        """Return the tokens so far of requests in flight, and the results of the last drain(), which may not have
        arrived."""
        running = await self._generator.partial()
        return {name: end for name, end in self._handed_out.items() if isinstance(end, Completion)} | dict(running)


class ActorGenerator(Routed):
    """A generator replica in another process. Requests of one turn of the event loop travel together, and so do the
    completions that are ready: two calls a batch, whatever its size."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = Remote[GeneratorActor](actor)
        self._outbox: list[GenerateRequest] = []
        self._pending: dict[str, asyncio.Future[Completion]] = {}
        self._pump: asyncio.Task[None] | None = None
        self._flushing: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Cancelling it aborts the request."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._pending[request.request_id] = future
        if not self._outbox:
            self._flushing = loop.create_task(self._flush())
        self._outbox.append(request)
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._receive())
        try:
            return await future
        finally:
            if future.cancelled():
                self._pending.pop(request.request_id, None)
                self._actor.send(GeneratorActor.abort, [request.request_id])

    async def _flush(self) -> None:
        """Hand over what came in this turn. Requests that are refused fail, all that came together."""
        requests, self._outbox = self._outbox, []
        try:
            await self._actor.send(GeneratorActor.submit, requests)
        except ray.exceptions.RayTaskError as refusal:
            for request in requests:
                future = self._pending.pop(request.request_id, None)
                if future is not None and not future.done():
                    future.set_exception(_raised(refusal))

    async def _receive(self) -> None:
        try:
            while self._pending:
                for request_id, outcome in completions_from_wire(await self._actor.send(GeneratorActor.drain)):
                    future = self._pending.pop(request_id, None)
                    if future is None or future.done():
                        continue
                    if isinstance(outcome, Exception):
                        future.set_exception(outcome)
                    else:
                        future.set_result(outcome)
        except ray.exceptions.RayError as failure:  # of every request, even where the process still runs
            self._fail_pending(_raised(failure))

    def _fail_pending(self, error: Exception) -> None:
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(error)

    async def health(self) -> Health:
        """Check the generator. Raises what its check raised, and ConnectionError where its process has exited."""
        try:
            return await self._actor.send(GeneratorActor.health)
        except ray.exceptions.RayError as failure:
            raise _raised(failure) from failure

    async def partial(self) -> dict[str, Completion]:
        return await self._actor.send(GeneratorActor.partial)

    async def close(self) -> None:
        if self._pump is not None:
            self._pump.cancel()


def _raised(failure: ray.exceptions.RayError) -> Exception:
    """Return what a call in a generator's process raised, without Ray's wrapper, which has no message of its own."""
    if isinstance(failure, ray.exceptions.RayTaskError):
        return failure.cause if isinstance(failure.cause, Exception) else failure
    return ConnectionError(f"the generator process has exited: {failure}")
