"""The key of the run: every call to a SGLang server carries it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollout.inference.backend import BackendSettings
from rollout.inference.sglang.client import SGLangClient
from rollout.inference.sglang.server import SGLangServer

KEY = "0123456789abcdef"


class KeyedServer(ThreadingHTTPServer):
    """Answers 401 to calls without the key, as SGLang does with api_key."""

    refused = 0


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: KeyedServer

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        allowed = self.headers["Authorization"] == f"Bearer {KEY}"
        self.server.refused += not allowed
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_GET

    def log_message(self, *args: Any) -> None:
        """Silence."""


@pytest.fixture
def keyed() -> Iterator[KeyedServer]:
    with KeyedServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def launched(keyed: KeyedServer, folder: Path, *, key: str) -> SGLangServer:
    """A server object of these settings, at the address of `keyed`."""
    server = SGLangServer(
        BackendSettings(name="generator-0", model_path=str(folder), log_file=folder / "log", gpus=(), key=key)
    )
    server._url = f"http://127.0.0.1:{keyed.server_port}"
    return server


async def over_client(server: SGLangServer) -> bool:
    client = SGLangClient("generator-0", server.endpoint.url, key=server.settings.key)
    try:
        await client.post(("/generate", {}))
        return await client.answers("/model_info", timeout_seconds=10)
    finally:
        await client.close()


def test_every_call_carries_the_key(keyed: KeyedServer, tmp_path: Path) -> None:
    server = launched(keyed, tmp_path, key=KEY)
    assert server.endpoint.is_healthy(timeout_seconds=10)
    assert server.endpoint.post(("/update_weights_from_disk", {}), timeout_seconds=10) == {}
    assert asyncio.run(over_client(server))
    assert keyed.refused == 0


def test_without_the_key_a_server_does_not_answer(keyed: KeyedServer, tmp_path: Path) -> None:
    assert not launched(keyed, tmp_path, key="").endpoint.is_healthy(timeout_seconds=10)
    assert keyed.refused == 1


def test_the_key_is_not_shown(keyed: KeyedServer, tmp_path: Path) -> None:
    server = launched(keyed, tmp_path, key=KEY)
    assert KEY not in repr(server.settings) + repr(server.endpoint)
