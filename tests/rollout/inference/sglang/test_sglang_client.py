"""Buckets on their way to a server, and what its answers become."""

import asyncio
import base64
import contextlib
import io
import pickle
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.bucket import FlatBucket
from rollout.errors import GeneratorCallError, GeneratorGone
from rollout.inference.backend import BackendSettings
from rollout.inference.sglang.client import SGLangClient, SGLangEndpoint
from rollout.inference.sglang.receivers import payload_of
from rollout.inference.sglang.server import SGLangServer


def mixed_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "odd": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        "wide": torch.randn(7, generator=generator),
        "transposed": torch.randn(4, 6, generator=generator).T,
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }


def test_a_payload_pickles_with_nothing_but_torch_and_the_standard_library() -> None:
    """SGLang unpickles it under a list of modules it trusts; this project is not among them."""

    class Strict(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            assert module.partition(".")[0] in {"torch", "types", "collections", "builtins", "_codecs"}, module
            return super().find_class(module, name)

    bucket = FlatBucket.of(mixed_tensors())
    content = Strict(io.BytesIO(base64.b64decode(payload_of(bucket, bucket.flat, number=1)))).load()
    assert content["names"] == ("scalar", "wide", "transposed", "odd")
    assert content["dtypes"] == bucket.dtypes and content["shapes"] == bucket.shapes
    assert content["memory"].equal(bucket.flat) and (content["num_bytes"], content["number"]) == (len(bucket.flat), 1)


def test_tensors_that_fill_one_piece_of_memory_make_a_bucket_of_it() -> None:
    memory = torch.arange(10, dtype=torch.float32)
    parts = {"a": memory[:4].view(2, 2), "b": memory[4:]}
    bucket = FlatBucket.of(parts)
    assert bucket.flat.data_ptr() == memory.data_ptr() and bucket.num_bytes == 40
    assert all(torch.equal(bucket.tensors()[name], part) for name, part in parts.items())
    for copied in (
        {"b": parts["b"], "a": parts["a"]},  # another order
        {"a": memory[:4].view(2, 2).T, "b": memory[4:]},  # not contiguous
        {"a": memory[:4], "b": memory[5:]},  # a hole
        {"b": memory[4:]},  # its end
        {"a": memory[:4]},  # its beginning
        {"a": memory[:5], "b": memory[4:]},  # one place twice
    ):
        bucket = FlatBucket.of(copied)
        assert bucket.flat.untyped_storage().data_ptr() != memory.data_ptr()
        assert all(torch.equal(bucket.tensors()[name], part) for name, part in copied.items())


KEY = "0123456789abcdef"
RELEASED = threading.Event()
"""For answers to /slow."""


class _Answers(BaseHTTPRequestHandler):
    """Answers 401 to calls without the key, as SGLang does with api_key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/slow":
            RELEASED.wait()
        status = {"/refused": 400, "/absent": 404}.get(self.path, 200)
        if self.headers["Authorization"] != f"Bearer {KEY}":
            status = 401
        body = b'{"success": false, "message": "wrong shape"}' if status == 400 else b"{}"
        with contextlib.suppress(BrokenPipeError):  # who asked for /slow has left
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *args: Any) -> None:
        """Silence."""


@pytest.fixture
def answering() -> Iterator[SGLangEndpoint]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        RELEASED.clear()
        yield SGLangEndpoint(name="generator-3", url=f"http://127.0.0.1:{server.server_port}", tp=1, key=KEY)
        RELEASED.set()
        server.shutdown()
        thread.join()


def test_what_a_server_answers_becomes_an_error_that_names_it(answering: SGLangEndpoint) -> None:
    assert answering.post(("/fine", {}), timeout_seconds=60) == {}
    with pytest.raises(GeneratorCallError, match=r"generator-3: /refused failed \(HTTP 400\): wrong shape"):
        answering.post(("/refused", {}), timeout_seconds=60)
    with pytest.raises(GeneratorCallError, match=r"generator-3: this SGLang has no /absent; .* SGLang 0\.5\.17"):
        answering.post(("/absent", {}), timeout_seconds=60)
    with pytest.raises(GeneratorGone, match="generator-3 .* did not respond to /slow within 0.2 s"):
        answering.post(("/slow", {}), timeout_seconds=0.2)


def test_every_call_carries_the_key_of_the_run_which_is_not_shown(answering: SGLangEndpoint, tmp_path: Path) -> None:
    settings = BackendSettings(name="generator-3", model_path="/m", log_file=tmp_path / "log", gpus=(), key=KEY)
    server = SGLangServer(settings)
    server._url = answering.url

    async def over_client(key: str) -> bool:
        client = SGLangClient("generator-3", answering.url, key=key)
        try:
            await client.post(("/generate", {}))
            return await client.answers("/model_info", timeout_seconds=60)
        finally:
            await client.close()

    assert server.endpoint.is_healthy(timeout_seconds=60) and asyncio.run(over_client(KEY))
    assert not replace(server.endpoint, key="").is_healthy(timeout_seconds=60)
    with pytest.raises(GeneratorCallError, match="401"):
        asyncio.run(over_client(""))
    assert KEY not in repr(settings) + repr(server.endpoint)


MANY_POSTS = """
import asyncio, resource, sys
from rollout.inference.sglang.client import SGLangClient
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
async def main():
    client = SGLangClient("generator-0", sys.argv[1])
    answers = await asyncio.gather(*(client.post(("/x", {})) for _ in range(600)))
    await client.close()
    print(len(answers))
asyncio.run(main())
"""


def test_more_requests_than_a_process_may_have_open_files_at_first_are_in_flight_at_once() -> None:
    async def main() -> bytes:
        waiting, all_there = 0, asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal waiting
            await reader.readuntil(b"{}")
            waiting += 1
            if waiting == 600:
                all_there.set()
            await all_there.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            await writer.drain()
            writer.close()

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1000)
        try:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            command = [sys.executable, "-c", MANY_POSTS, url]
            root = Path(__file__).resolve().parents[4]
            child = await asyncio.create_subprocess_exec(*command, cwd=root, stdout=subprocess.PIPE)
            out, _ = await asyncio.wait_for(child.communicate(), 60)
        finally:
            server.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return out

    assert asyncio.run(main()) == b"600\n"
