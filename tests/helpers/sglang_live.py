"""A real SGLang server on the CPU for a file of tests, and requests for it."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from helpers.sglang_environment import VOCAB, Models, running_server, set_interrupt, settings_for
from rollout.bucket import FlatBucket
from rollout.inference.sglang.generator import SGLangGenerator
from rollout.inference.sglang.server import SGLangServer
from rollout.types import GenerateRequest, SamplingParams

T = TypeVar("T")

CPU = torch.device("cpu")

TOLERANCE = 1e-4  # nats; float32 on both sides, summed in different orders


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    with running_server(settings_for(models.folder, tmp_path_factory.mktemp("log") / "generator-0.log")) as server:
        yield server


def with_generator(server: SGLangServer, interrupt: Any, use: Callable[[SGLangGenerator], Awaitable[T]]) -> T:
    async def main() -> T:
        set_interrupt(server, interrupt)
        generator = SGLangGenerator(server)
        try:
            return await use(generator)
        finally:
            await generator.close()

    return asyncio.run(main())


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB - 1, length).tolist()


def request(name: str, prompt: list[int], **sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_ids=prompt, sampling=SamplingParams(**sampling))


async def update(generator: Any, models: Models, version: int) -> None:
    await generator.pause()
    await generator.update_weights(FlatBucket.of(models.weights(version)))
    await generator.resume(version)
