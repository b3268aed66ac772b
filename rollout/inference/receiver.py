"""Weights by broadcast for a replica without a server of its own: its process answers the calls by which the trainer
sends weights to a SGLang server.

The buckets are kept until take(), so the replica samples with its old weights meanwhile, also when the trainer ends
before the last bucket.
"""

import asyncio
import math
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from aiohttp import web

from model_specs.untrusted import is_secret, parse_json
from rollout.bucket import FlatBucket, join_group
from rollout.inference.sglang.client import SGLangEndpoint, headers


class BroadcastReceiver:
    """One rank in the groups of weight pushes, in the event loop that calls start()."""

    def __init__(self, name: str, host: str, *, timeout_seconds: float) -> None:
        """`name`: of the replica. `host`: address to listen on. `timeout_seconds`: of joining a group and of a
        bucket."""
        self._name, self._host, self._key = name, host, secrets.token_hex(32)
        self._limit = timedelta(seconds=timeout_seconds)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._buckets: list[FlatBucket] = []
        self._runner: web.AppRunner | None = None

    async def start(self) -> SGLangEndpoint:
        """Listen; return what the trainer's ranks call."""
        app = web.Application()
        for path, call in {
            "/init_weights_update_group": self._join,
            "/update_weights_from_distributed": self._receive,
            "/destroy_weights_update_group": self._leave,
        }.items():
            app.router.add_post(path, self._handler(call))
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, 0).start()
        port = self._runner.addresses[0][1]
        return SGLangEndpoint(name=self._name, url=f"http://{self._host}:{port}", tp=1, key=self._key)

    def take(self) -> list[FlatBucket]:
        """Return what has come since the last call."""
        buckets, self._buckets = self._buckets, []
        return buckets

    def _handler(self, call: Callable[[dict[str, Any]], None]) -> Callable[[web.Request], Any]:
        async def answer(request: web.Request) -> web.Response:
            if not is_secret(request.headers.get("Authorization", ""), headers(self._key)["Authorization"]):
                return web.json_response({"success": False, "message": "the key is missing or another"}, status=401)
            try:
                await asyncio.to_thread(call, cast(dict[str, Any], parse_json(await request.read())))
            except (RuntimeError, KeyError) as error:  # the first: of a process group whose other side has ended
                return web.json_response({"success": False, "message": str(error)}, status=400)
            return web.json_response({"success": True})

        return answer

    def _join(self, body: dict[str, Any]) -> None:
        for name in [*self._groups]:  # of a trainer that has gone
            self._leave({"group_name": name})
        store = dist.TCPStore(body["master_address"], body["master_port"], timeout=self._limit)
        self._groups[body["group_name"]] = join_group(
            store, body["group_name"], backend=body["backend"], rank=body["rank_offset"], world=body["world_size"],
            timeout=self._limit,
        )  # fmt: skip

    def _receive(self, body: dict[str, Any]) -> None:
        dtypes = tuple(getattr(torch, name) for name in body["dtypes"])
        shapes = tuple(tuple(shape) for shape in body["shapes"])
        num_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in zip(dtypes, shapes, strict=True))
        flat = torch.empty(num_bytes, dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=self._groups[body["group_name"]])
        self._buckets.append(FlatBucket(names=tuple(body["names"]), dtypes=dtypes, shapes=shapes, flat=flat))

    def _leave(self, body: dict[str, Any]) -> None:
        dist.destroy_process_group(self._groups.pop(body["group_name"]))
