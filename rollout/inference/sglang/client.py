"""The asyncio HTTP client of one SGLang server: thousands of POSTs in flight on one event loop.

Bodies and answers are bytes of orjson; numpy arrays go in without becoming Python lists.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import aiohttp
import orjson

from rollout.inference.errors import GeneratorGone
from rollout.inference.sglang.weights import Call, check_answer, headers

_OPEN_FILES = 65_536
"""As many as one process ever needs, and no more: programs exist that go through all that are allowed, one by one."""


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class SGLangClient:
    """POSTs to one server. Make it inside the event loop that uses it."""

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
            raise GeneratorGone(
                f"{self.name} ({self.url}) did not respond to {path} within {timeout_seconds:g} s"
            ) from e
        except (aiohttp.ClientError, OSError) as e:
            raise GeneratorGone(f"{self.name} ({self.url}) is unreachable ({path}: {type(e).__name__}: {e})") from e
        try:
            answer = orjson.loads(raw) if raw else {}
        except orjson.JSONDecodeError:
            answer = raw.decode(errors="replace")
        return check_answer(self.name, path, status, answer)

    async def answers(self, path: str, *, timeout_seconds: float) -> bool:
        """Return whether a GET of `path` is answered by 200 in time."""
        try:
            async with asyncio.timeout(timeout_seconds), self._session.get(path) as response:
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False

    async def close(self) -> None:
        await self._session.close()
