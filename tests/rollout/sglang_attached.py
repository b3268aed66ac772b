"""A SGLangGenerator on a test double."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sglang_double.server import SGLangDouble

from rollout.sglang_generator import SGLangGenerator
from rollout.sglang_server import ServerSettings, SGLangServer
from rollout.types import GenerateRequest, SamplingParams


class AttachedServer(SGLangServer):
    """A server that runs already."""

    def __init__(self, settings: ServerSettings, url: str) -> None:
        super().__init__(settings)
        self._url = url


@asynccontextmanager
async def generator_on(
    double: SGLangDouble, folder: Path, *, interrupt: Any = "abort", name: str = "generator-0", **settings: Any
) -> AsyncIterator[SGLangGenerator]:
    """`folder`: of the tiny model. `settings`: of the server."""
    values = {"model_path": str(folder), "log_file": folder / "server.log", "gpus": (), "tp": double.tp}
    server = AttachedServer(ServerSettings(name=name, **values | settings), double.url)
    generator = SGLangGenerator(server, interrupt=interrupt)
    try:
        yield generator
    finally:
        await generator.close()


def request(name: str, *, prompt: int = 4, seed: int = 0, **sampling: Any) -> GenerateRequest:
    """A prompt of so many tokens."""
    return GenerateRequest(
        request_id=name, prompt_ids=list(range(prompt)), sampling=SamplingParams(**sampling), seed=seed
    )
