"""Environments of an OpenEnv server: https://github.com/meta-pytorch/OpenEnv. The server runs apart, with the packages
that it needs; its WebSocket protocol is spoken here, so nothing has to be installed beside the run.
"""

import asyncio
import json
from collections.abc import Mapping

import aiohttp

from model_specs.untrusted import parse_json

_MAX_MESSAGE_BYTES = 16 * 2**20
_CONNECT_SECONDS = 10.0
_NOT_READ = ("done", "reward", "metadata")
"""Fields of observations that are not for the policy."""


class OpenEnv:
    """An environment of the server at an address. The answer of the policy becomes the one text field of an action, or
    the field FIELD of URL#FIELD. The policy reads the text of an observation, or JSON where it has more fields."""

    def __init__(self, name: str) -> None:
        """Raises aiohttp.ClientError where no such server answers, and ValueError for one with other actions."""
        url, _, self._field = name.partition("#")
        self._loop = asyncio.new_event_loop()
        try:
            self._loop.run_until_complete(self._connect(url.rstrip("/")))
        except BaseException:
            self.close()
            raise

    def reset(self, row: Mapping[str, object], seed: int) -> str:
        return self._ask("reset", {"seed": seed % 2**31})[0]

    def step(self, action: str) -> tuple[str, float, bool]:
        return self._ask("step", {self._field: action})

    def close(self) -> None:
        self._loop.run_until_complete(self._http.close())
        self._loop.close()

    async def _connect(self, url: str) -> None:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(connect=_CONNECT_SECONDS))
        if not self._field:
            async with self._http.get(f"{url}/schema", raise_for_status=True) as response:
                self._field = _text_field(await response.read(), url)
        self._socket = await self._http.ws_connect(f"{url}/ws", max_msg_size=_MAX_MESSAGE_BYTES)

    def _ask(self, what: str, data: Mapping[str, object]) -> tuple[str, float, bool]:
        """Send a message; return observation, reward and whether the episode is over. Raises RuntimeError."""

        async def exchange() -> str:
            await self._socket.send_json({"type": what, "data": data})
            return await self._socket.receive_str()

        answer = parse_json(self._loop.run_until_complete(exchange()))
        if not isinstance(answer, dict) or answer.get("type") != "observation":
            raise RuntimeError(f"the server answers {what} with {str(answer)[:1000]}")
        found = answer["data"]
        return _shown(found["observation"]), float(found.get("reward") or 0.0), bool(found.get("done"))


def _text_field(schema: bytes, url: str) -> str:
    """Return the one text of the actions of a server. Raises ValueError."""
    known = parse_json(schema)
    fields = known["action"]["properties"] if isinstance(known, dict) else {}
    texts = [str(field) for field, about in fields.items() if about.get("type") == "string"]
    if len(texts) != 1:
        raise ValueError(f"its actions have {len(texts)} texts ({', '.join(texts)}); name one, as in {url}#FIELD")
    return texts[0]


def _shown(observation: Mapping[str, object]) -> str:
    said = {name: value for name, value in observation.items() if name not in _NOT_READ}
    texts = [*said.values()]
    return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else json.dumps(said, ensure_ascii=False)
