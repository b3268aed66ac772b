"""The HTTP interface of a SGLang server: the way of weights from the trainer's ranks, and the client of a generator.

Invariant: a server is paused when a call that changes weights reaches it; otherwise it would first wait for every
running request to end. Such calls do not flush the cache: prefixes are kept apart by version (hooks/scheduler.py), and
a flush with requests waiting would fail and take the server down.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import resource
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import aiohttp
import orjson
from torch import Tensor

from model_specs.hf_config import read_config
from rollout.bucket import FlatBucket
from rollout.errors import GeneratorCallError, GeneratorGone
from rollout.inference.backend import GroupMembership
from rollout.inference.sglang.arguments import SGLANG
from rollout.inference.sglang.checksums import ExpectedChecksums, ModelShape
from rollout.inference.sglang.disk import folder_call
from rollout.inference.sglang.hooks.in_flight import ALIVE
from rollout.inference.sglang.ipc import RELEASE, share, shared_call
from rollout.inference.sglang.nccl import broadcast_call

Call = tuple[str, dict[str, object]]
"""Path and JSON body of a POST."""

_OPEN_FILES = 65_536
"""Most open files of a process: enough for its requests, and few enough for programs that close every possible one."""


@dataclass(frozen=True, kw_only=True)
class SGLangEndpoint:
    """See rollout.inference.backend.WeightEndpoint. Every call is a POST on a connection of its own."""

    name: str
    url: str
    tp: int
    pp: int = 1
    key: str = field(default="", repr=False)
    """See headers()."""
    model_path: str = ""
    """The server's model folder: its config.json determines how the server fuses and shards parameters."""
    trainer_ranks: tuple[int, ...] = ()
    """Shared slots: the trainer's rank in the place of each tensor-parallel rank."""

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    def beside(self, trainer_ranks: tuple[int, ...]) -> SGLangEndpoint:
        return replace(self, trainer_ranks=trainer_ranks)

    def join_group(self, group: GroupMembership, *, timeout_seconds: float) -> None:
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": group.first_rank,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        self.post(("/init_weights_update_group", body), timeout_seconds=timeout_seconds)

    def receive_bucket(self, bucket: FlatBucket, *, group: str, timeout_seconds: float) -> None:
        self.post(broadcast_call(bucket, group), timeout_seconds=timeout_seconds)

    def leave_group(self, group: str, *, timeout_seconds: float) -> None:
        self.post(("/destroy_weights_update_group", {"group_name": group}), timeout_seconds=timeout_seconds)

    def share(self, bucket: FlatBucket, memory: Tensor | None, *, number: int) -> str:
        return share(bucket, memory, number=number)

    def receive_shared(self, shared: Sequence[str], *, timeout_seconds: float) -> None:
        self.post(shared_call(shared), timeout_seconds=timeout_seconds)

    def release_shared(self, *, timeout_seconds: float) -> None:
        self.post(shared_call([RELEASE] * self.tp), timeout_seconds=timeout_seconds)

    def load_folder(self, path: str, *, timeout_seconds: float) -> None:
        self.post(folder_call(path), timeout_seconds=timeout_seconds)

    def expected_checksums(self) -> ExpectedChecksums:
        return ExpectedChecksums(ModelShape.from_config(read_config(self.model_path)), tp=self.tp)

    def checksums(self, *, timeout_seconds: float) -> list[dict[str, int]]:
        ranks = self._check("checksum", timeout_seconds)
        return [{name: int(value) for name, value in rank.items()} for rank in ranks]

    def formats(self, *, timeout_seconds: float) -> list[dict[str, str]]:
        return self._check("formats", timeout_seconds)

    def _check(self, action: str, timeout_seconds: float) -> list[dict[str, str]]:
        """Return a value for each parameter, of each tensor-parallel rank (hooks/checksums.py)."""
        answer = self.post(("/weights_checker", {"action": action}), timeout_seconds=timeout_seconds)
        ranks = sorted(answer["ranks"], key=lambda rank: rank["parallelism_info"]["tp_rank"])
        return [dict(rank["checksums"]) for rank in ranks]

    def is_healthy(self, *, timeout_seconds: float) -> bool:
        """Return whether the server's scheduler answers in time."""
        try:
            request = Request(f"{self.url}{ALIVE}", headers=headers(self.key))
            with urlopen(request, timeout=timeout_seconds) as response:
                return response.status == 200
        except OSError:
            return False

    def post(self, call: Call, *, timeout_seconds: float) -> dict[str, Any]:
        """Return the JSON answer of a call. Raises GeneratorCallError, GeneratorGone."""
        path, body = call
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_seconds)
        try:
            connection.request("POST", path, json.dumps(body), headers(self.key))
            response = connection.getresponse()
            raw = response.read()
        except TimeoutError as e:
            raise _late(self.name, self.url, path, timeout_seconds) from e
        except (OSError, http.client.HTTPException) as e:
            raise _unreachable(self.name, self.url, path, e) from e
        finally:
            connection.close()
        return _checked(self.name, path, response.status, raw)


class SGLangClient:
    """POSTs to one server, thousands in flight on one event loop: make it inside that loop. Bodies and answers are
    bytes of orjson; numpy arrays go in without becoming Python lists."""

    def __init__(self, name: str, url: str, *, key: str = "") -> None:
        self.name, self.url = name, url
        # A request is one connection, and one open file, for as long as it samples: no limits on either.
        _allow_open_files()
        self._session = aiohttp.ClientSession(
            url,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
            headers=headers(key),
        )

    async def post(self, call: Call, *, timeout_seconds: float | None = None) -> dict[str, Any]:
        """Return the JSON answer. Raises GeneratorCallError when the server refuses, GeneratorGone when it is not there
        or (with `timeout_seconds`) does not answer in time."""
        path, body = call
        try:
            async with (
                asyncio.timeout(timeout_seconds),
                self._session.post(path, data=orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)) as response,
            ):
                raw, status = await response.read(), response.status
        except TimeoutError as e:
            raise _late(self.name, self.url, path, timeout_seconds) from e
        except (aiohttp.ClientError, OSError) as e:
            raise _unreachable(self.name, self.url, path, e) from e
        return _checked(self.name, path, status, raw)

    async def answers(self, path: str, *, timeout_seconds: float) -> bool:
        """Return whether a GET of `path` is answered by 200 in time."""
        try:
            async with asyncio.timeout(timeout_seconds), self._session.get(path) as response:
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False

    async def close(self) -> None:
        await self._session.close()


def headers(key: str) -> dict[str, str]:
    """Return the headers of a call to a server that was started with this key as its api_key."""
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


def _checked(server: str, path: str, status: int, raw: bytes) -> dict[str, Any]:
    """Return the JSON answer of a call that succeeded. Raises GeneratorCallError."""
    if status in (404, 405):
        raise GeneratorCallError(
            f"{server}: this SGLang has no {path}; Slipstream is written for SGLang {SGLANG} "
            f"(pip install sglang=={SGLANG})"
        )
    try:
        answer = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError:
        answer = raw.decode(errors="replace")
    if not isinstance(answer, dict):
        answer = {"message": str(answer)}
    if status != 200 or answer.get("success") is False:
        message = answer.get("message") or answer.get("error") or answer.get("detail") or answer
        raise GeneratorCallError(f"{server}: {path} failed (HTTP {status}): {message}")
    return answer


def _late(server: str, url: str, path: str, seconds: float | None) -> GeneratorGone:
    return GeneratorGone(f"{server} ({url}) did not respond to {path} within {seconds:g} s")


def _unreachable(server: str, url: str, path: str, error: Exception) -> GeneratorGone:
    return GeneratorGone(f"{server} ({url}) is unreachable ({path}: {type(error).__name__}: {error})")


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
