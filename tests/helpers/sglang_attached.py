"""A SGLangGenerator on a test double, one token a step."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from helpers.sglang_double.scheduler import logprob_of, token_at
from helpers.sglang_double.server import SGLangDouble
from helpers.sglang_environment import replica
from rollout.inference.backend import BackendSettings
from rollout.inference.sglang.generator import SGLangGenerator
from rollout.inference.sglang.server import SGLangServer
from rollout.types import Completion, GenerateRequest, SamplingParams


class AttachedServer(SGLangServer):
    """A server that runs already."""

    def __init__(self, settings: BackendSettings, url: str) -> None:
        super().__init__(settings)
        self._url = url


@asynccontextmanager
async def generator_on(
    double: SGLangDouble, folder: Path, *, interrupt: Any = "abort", name: str = "generator-0", **settings: Any
) -> AsyncIterator[SGLangGenerator]:
    """`folder`: of the tiny model. `settings`: of the server."""
    values = {"model_path": str(folder), "log_file": folder / "server.log", "gpus": (), "tp": double.tp}
    server = AttachedServer(replica(name=name, interrupt=interrupt, **values | settings), double.url)
    generator = SGLangGenerator(server)
    try:
        yield generator
    finally:
        await generator.close()


def request(name: str, *, prompt: int = 4, seed: int = 0, **sampling: Any) -> GenerateRequest:
    """A prompt of so many tokens."""
    return GenerateRequest(
        request_id=name, prompt_ids=list(range(prompt)), sampling=SamplingParams(**sampling), seed=seed
    )


@asynccontextmanager
async def attached(folder: Path, **settings: Any) -> AsyncIterator[tuple[SGLangGenerator, SGLangDouble]]:
    """A generator whose weights are of version 0, and its server."""
    with SGLangDouble(tp=settings.get("tp", 1), samples=False) as double:
        async with generator_on(double, folder, **settings) as generator:
            await generator.resume(0)
            yield generator, double


def at_the_server(num_requests: int) -> Callable[[SGLangDouble], bool]:
    return lambda double: double.num_requests == num_requests


def check(completion: Completion, versions: list[int], *, prompt: int = 4) -> None:
    """Every token is the one that its version samples at its place, with the log-probability of that token."""
    assert completion.versions.tolist() == versions
    expected = [token_at(prompt + i, version) for i, version in enumerate(versions)]
    assert completion.token_ids.tolist() == expected
    assert completion.logprobs.tolist() == [logprob_of(token) for token in expected]


def sampling_of(double: SGLangDouble, key: str) -> list[Any]:
    return [body["sampling_params"].get(key) for body in double.bodies("/generate")]
