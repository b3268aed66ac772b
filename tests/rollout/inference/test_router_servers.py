"""The router over SGLang generators on test doubles: what it keeps, what it reports, and where requests go on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from helpers.sglang_attached import generator_on, request
from helpers.sglang_double import model
from helpers.sglang_double.scheduler import token_at
from helpers.sglang_double.server import SGLangDouble
from rollout.errors import GeneratorCallError
from rollout.inference.backend import GeneratorConfig
from rollout.inference.router import Router
from rollout.inference.sglang.generator import SGLangGenerator


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model.write(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def fleet(
    folder: Path, doubles: list[SGLangDouble], *, interrupt: str = "abort"
) -> AsyncIterator[tuple[Router, list[SGLangGenerator]]]:
    """A router over one generator a double, all of version 0."""
    async with AsyncExitStack() as stack:
        generators = [
            await stack.enter_async_context(generator_on(double, folder, name=f"generator-{i}", interrupt=interrupt))
            for i, double in enumerate(doubles)
        ]
        router = Router(generators, GeneratorConfig(health_timeout_seconds=30.0, patience_seconds=0.0))
        for generator in generators:
            await generator.resume(0)
        yield router, generators


async def where(doubles: list[SGLangDouble], num_requests: int = 1) -> SGLangDouble:
    """The double that has so many requests, as soon as one has."""
    while True:
        for double in doubles:
            if double.num_requests == num_requests:
                return double
        await asyncio.sleep(0.001)


def tokens(versions: list[int]) -> list[int]:
    return [token_at(4 + i, version) for i, version in enumerate(versions)]


async def test_what_an_interrupted_request_was_handed_back_is_kept_while_it_waits_and_freed_when_it_ends(
    folder,
) -> None:
    with SGLangDouble(samples=False) as double:
        async with fleet(folder, [double]) as (router, (generator,)):
            for name, ends in (("completed", True), ("cancelled", False)):
                running = asyncio.create_task(router.generate(request(name, max_new_tokens=5)))
                await where([double])
                await double.step(2)
                await generator.pause()
                told = await router.partial()
                assert list(told) == [name] and told[name].token_ids.tolist() == tokens([0, 0])
                if ends:
                    await generator.resume(0)
                    await where([double])
                    await double.step(3)
                    assert (await running).token_ids.tolist() == tokens([0] * 5)
                else:
                    running.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await running
                assert await router.partial() == {}


async def test_a_dropped_connection_of_a_healthy_server_is_tried_again_and_an_error_that_stays_is_raised(
    folder,
) -> None:
    with SGLangDouble(samples=False) as double:
        async with fleet(folder, [double]) as (router, _):
            double.faults.drop("/generate")
            running = asyncio.create_task(router.generate(request("a", max_new_tokens=2)))
            await where([double])
            await double.step(2)
            assert (await running).token_ids.tolist() == tokens([0, 0])
            double.faults.refuse("/generate", "out of order", times=100)
            with pytest.raises(GeneratorCallError, match="generator-0: /generate failed .*: out of order"):
                await router.generate(request("b", max_new_tokens=2))
            assert len(double.bodies("/generate")) == 2 + 4, "the first attempt and three more"
            assert router.lost == {}


async def test_a_router_that_is_closed_takes_its_closed_generators_for_no_failures(folder: Path, caplog) -> None:
    with SGLangDouble(samples=False) as double:
        async with generator_on(double, folder) as generator:
            await generator.resume(0)
            router = Router([generator], GeneratorConfig(health_interval_seconds=0.001, patience_seconds=0.0))
            running = asyncio.create_task(router.generate(request("a", max_new_tokens=1)))
            await where([double])
            await double.step()
            await running
            await router.close()
            await asyncio.sleep(1.5)  # a failed health check takes a second
            assert router.lost == {} and "failed" not in caplog.text
