"""The double itself: an HTTP server in a thread of its own, with the paths of a SGLang server that the product calls.

    with SGLangDouble(tp=2) as double:
        ... double.url ...

Nothing of the product is imported. What it answers is compared with the recorded answers of a real server.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import torch
from aiohttp import web
from torch import Tensor

from helpers.sglang_double import model
from helpers.sglang_double.answers import answer_of
from helpers.sglang_double.faults import Drop, Faults, Hold, Refusal
from helpers.sglang_double.groups import GlooRank
from helpers.sglang_double.scheduler import Request, Scheduler
from helpers.sglang_double.updates import BROADCAST, DISK, UPDATES, from_broadcast, from_disk, from_tensors
from helpers.sglang_double.weights import Parameters

Answer = dict[str, Any] | str


@dataclass(frozen=True, kw_only=True)
class Received:
    """A call as it reached the server."""

    path: str
    query: dict[str, str]
    body: dict[str, Any]
    paused: bool
    num_requests: int
    """How many requests the scheduler had."""


class Refused(Exception):
    """The call failed; the answer is {"success": false} with HTTP 400."""


class SGLangDouble:
    """One server of `tp` ranks. `samples`: steps follow each other by themselves; else each one is a step()."""

    def __init__(self, *, tp: int = 1, samples: bool = True, dtype: torch.dtype = torch.float32) -> None:
        self.tp, self.faults = tp, Faults()
        self.calls: list[Received] = []
        """All of them, in order of arrival."""
        self.parameters = Parameters(model.weights(0), tp=tp, dtype=dtype)
        self.groups: dict[str, list[GlooRank]] = {}
        self.ranks_backwards = False
        """Ranks report their checksums in the opposite order."""
        self.tells_versions = True
        """A server of several pipeline stages does not."""
        self._flips: dict[int, dict[str, Any]] = {}
        self._num_updates = self._updates_now = 0
        self.most_updates_at_once = 0
        """A real server handles one after the other, and waits in each for its sender."""
        self.push: str | None = None
        self.receives_later = False
        """As on a GPU, a broadcast is answered before it is received: by receive_next()."""
        self._announced: list[dict[str, Any]] = []
        self._samples = samples
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._going_on = asyncio.Event()
        self._going_on.set()

    def __enter__(self) -> SGLangDouble:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def flip_after(self, num_updates: int, **flip: Any) -> None:
        """Parameters.flip() when so many more updates have been received."""
        self._flips[self._num_updates + num_updates] = flip

    async def kill(self) -> None:
        """Close all connections and listen no more."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._stop(), self._loop))

    async def step(self, count: int = 1) -> None:
        """Sample so many tokens for every request that has not ended."""
        await self._inside(lambda: [self.scheduler.step() for _ in range(count)])

    async def until(self, holds: Callable[[SGLangDouble], object]) -> None:
        """Return when `holds` does."""
        while not await self._inside(lambda: holds(self)):
            await asyncio.sleep(0.001)

    async def receive_next(self) -> None:
        """Receive the first of the broadcasts that have been answered."""
        receiving = self._load(BROADCAST, self._announced.pop(0))
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(receiving, self._loop))

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """Of the calls of one path so far."""
        return [call.body for call in list(self.calls) if call.path == path]

    @property
    def num_announced(self) -> int:
        """Broadcasts that have been answered and not received."""
        return len(self._announced)

    @property
    def num_requests(self) -> int:
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    async def _inside(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return function()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))

    async def _start(self) -> None:
        self.scheduler = Scheduler()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._stepping = asyncio.ensure_future(self._step_on())

    async def _stop(self) -> None:
        """Safe to call twice."""
        self._stepping.cancel()
        await self._runner.cleanup()

    async def _step_on(self) -> None:
        while self._samples:
            await asyncio.sleep(0.001)
            self.scheduler.step()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read() or b"{}")
        fault = self.faults.next(request.path)
        if isinstance(fault, Hold) and fault.where == "call":
            await fault.here()
        self.calls.append(
            Received(
                path=request.path, query=dict(request.query), body=body, paused=self.scheduler.paused,
                num_requests=self.num_requests,
            )
        )  # fmt: skip
        if isinstance(fault, Drop):
            assert request.transport is not None, "its client is there"
            request.transport.abort()
            raise asyncio.CancelledError
        if isinstance(fault, Refusal):
            return web.json_response(fault.answer, status=fault.status)
        status, answer = await self._answer(request.path, dict(request.query), body)
        if isinstance(fault, Hold) and fault.where == "answer":
            await fault.here()
        return (
            web.Response(text=answer, status=status)
            if isinstance(answer, str)
            else web.json_response(answer, status=status)
        )

    async def _answer(self, path: str, query: dict[str, str], body: dict[str, Any]) -> tuple[int, Answer]:
        paths: dict[str, Callable[[dict[str, Any]], Awaitable[Answer]]] = {
            "/generate": self._generate,
            "/slipstream_alive": self._nothing,
            "/model_info": self._nothing,
            "/freeze_gc": self._nothing,
            "/release_memory_occupation": self._nothing,
            "/resume_memory_occupation": self._nothing,
            "/slipstream_in_flight": self._in_flight,
            "/pause_generation": self._pause,
            "/continue_generation": self._go_on,
            "/abort_request": self._abort,
            "/weights_checker": self._checksums,
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
        }
        if path == "/flush_cache":
            return await self._flush(float(query.get("timeout", 0)))
        if path in UPDATES:
            return await self._update(path, body)
        if path not in paths:
            return 404, {"detail": "Not Found"}
        try:
            return 200, await paths[path](body)
        except Refused as e:
            return 400, {"success": False, "message": str(e)}

    async def _nothing(self, body: dict[str, Any]) -> Answer:
        return ""

    async def _generate(self, body: dict[str, Any]) -> Answer:
        await self._going_on.wait()  # a paused server keeps new requests away from its scheduler
        begin = time.time()
        request = Request(body["rid"], body["input_ids"], body["sampling_params"], self._loop.create_future())
        self.scheduler.add(request)
        try:
            reason = await request.answer
        finally:
            self.scheduler.abort(request)
        return answer_of(request, reason, begin, tells_versions=self.tells_versions)

    async def _in_flight(self, body: dict[str, Any]) -> Answer:
        return {"answers": [self.scheduler.in_flight()]}

    async def _pause(self, body: dict[str, Any]) -> Answer:
        self._going_on.clear()
        self.scheduler.pause(body["mode"])
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def _go_on(self, body: dict[str, Any]) -> Answer:
        self.scheduler.go_on(int(body["rid"]))
        self._going_on.set()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def _abort(self, body: dict[str, Any]) -> Answer:
        assert body["abort_all"], "the product aborts single requests by closing their connections"
        self.scheduler.abort_all()
        return ""

    async def _flush(self, timeout_seconds: float) -> tuple[int, str]:
        try:
            await asyncio.wait_for(self.scheduler.idle.wait(), timeout_seconds or 0.001)
        except TimeoutError:
            return 400, "Flush cache failed."
        return 200, "Cache flushed."

    async def _checksums(self, body: dict[str, Any]) -> Answer:
        ranks = [
            {
                "checksums": (checksums := self.parameters.checksums(rank)),
                "per_gpu_checksum": hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest(),
                "parallelism_info": {
                    "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "rank": rank, "size": self.tp,
                    "tp_rank": rank, "tp_size": self.tp,
                },
            }
            for rank in range(self.tp)
        ]  # fmt: skip
        order = ranks[::-1] if self.ranks_backwards else ranks
        return {"success": True, "message": "Success", "ranks": order, "per_engine_checksum": "of all ranks"}

    async def _join(self, body: dict[str, Any]) -> Answer:
        def rank(number: int) -> Awaitable[GlooRank]:
            return asyncio.to_thread(
                GlooRank, body["master_address"], body["master_port"], name=body["group_name"],
                rank=body["rank_offset"] + number, world_size=body["world_size"],
            )  # fmt: skip

        try:
            self.groups[body["group_name"]] = list(await asyncio.gather(*map(rank, range(self.tp))))
        except RuntimeError as e:
            raise Refused(f"Failed to initialize custom process group: {e}.") from e
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    async def _leave(self, body: dict[str, Any]) -> Answer:
        if self.groups.pop(body["group_name"], None) is None:
            raise Refused("The group to be destroyed does not exist.")
        return {"success": True, "message": "Succeeded to destroy custom process group."}

    async def _update(self, path: str, body: dict[str, Any]) -> tuple[int, Answer]:
        if not self.scheduler.paused:  # then it waits for all requests to end
            await self.scheduler.idle.wait()
        more = {"num_paused_requests": 0} if path == DISK else {}
        self._updates_now += 1
        self.most_updates_at_once = max(self.most_updates_at_once, self._updates_now)
        try:
            if path == BROADCAST and self.receives_later:
                self._announced.append(body)
            else:
                await self._load(path, body)
        except (ValueError, RuntimeError, OSError, KeyError) as e:  # ChangesError among them
            return 400, {"success": False, "message": f"Failed to update weights: {e}", **more}
        finally:
            self._updates_now -= 1
        self._num_updates += 1
        if flip := self._flips.pop(self._num_updates, None):
            self.parameters.flip(**flip)
        return 200, {"success": True, "message": "Succeeded to update weights.", **more}

    async def _load(self, path: str, body: dict[str, Any]) -> None:
        for rank, tensors in enumerate(await self._received(path, body)):
            self.parameters.load(tensors, rank)

    async def _received(self, path: str, body: dict[str, Any]) -> list[dict[str, Tensor]]:
        """Full tensors for each rank."""
        if path == BROADCAST:
            return await from_broadcast(body, self.groups[body["group_name"]])
        if path == DISK:
            push, self.push = self.push, None
            received, self.push = from_disk(body, tp=self.tp, push=push)
            return received
        return from_tensors(body, tp=self.tp)
