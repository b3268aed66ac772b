"""The router over SGLang generators on test doubles: what it keeps, what it reports, and where requests go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from helpers.sglang_attached import generator_on, request
from helpers.sglang_double import model
from helpers.sglang_double.scheduler import token_at
from helpers.sglang_double.server import SGLangDouble
from rollout.inference.errors import GeneratorCallError
from rollout.inference.router import NoGeneratorError, Router
from rollout.inference.sglang.generator import SGLangGenerator
from rollout.types import Health


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
        router = Router(generators, health_timeout_seconds=30.0)
        await router.resume(0)
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


def test_what_an_interrupted_request_was_handed_back_is_kept_while_it_waits_and_freed_when_it_ends(
    folder: Path,
) -> None:
    async def main() -> None:
        async with fleet(folder, [double]) as (router, _):
            for name, ends in (("completed", True), ("cancelled", False)):
                running = asyncio.create_task(router.generate(request(name, max_new_tokens=5)))
                await where([double])
                await double.step(2)
                await router.pause()
                told = await router.partial()
                assert list(told) == [name] and told[name].token_ids.tolist() == tokens([0, 0])
                if ends:
                    await router.resume(0)
                    await where([double])
                    await double.step(3)
                    assert (await running).token_ids.tolist() == tokens([0] * 5)
                else:
                    running.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await running
                assert await router.partial() == {}

    with SGLangDouble(samples=False) as double:
        asyncio.run(main())


def test_health_is_the_oldest_version_and_the_load_of_all(folder: Path) -> None:
    async def main() -> None:
        async with fleet(folder, doubles) as (router, generators):
            for versions in ((4, 3), (3, 4), (5, 5)):
                for generator, version in zip(generators, versions, strict=True):
                    await generator.resume(version)
                assert (await router.health()).version == min(versions)
            running = [asyncio.create_task(router.generate(request(f"r{i}", max_new_tokens=1))) for i in range(3)]
            while sum(double.num_requests for double in doubles) < 3:
                await asyncio.sleep(0.001)
            assert await router.health() == Health(version=5, num_running=3, num_waiting=0)
            for double in doubles:
                await double.step()
            await asyncio.gather(*running)
            assert await router.health() == Health(version=5, num_running=0, num_waiting=0)

    with SGLangDouble(samples=False) as first, SGLangDouble(samples=False) as second:
        doubles = [first, second]
        asyncio.run(main())


def test_a_dropped_connection_of_a_healthy_server_is_tried_again_and_an_error_that_stays_is_raised(
    folder: Path,
) -> None:
    async def main() -> None:
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
            assert router.versions.lost() == {}

    with SGLangDouble(samples=False) as double:
        asyncio.run(main())


@pytest.mark.parametrize("path", ["/pause_generation", "/continue_generation"])
def test_a_server_that_fails_an_update_gets_no_more_requests(folder: Path, path: str) -> None:
    async def main() -> None:
        async with fleet(folder, [first, second]) as (router, _):
            first.faults.refuse(path, "it is busy", status=200)
            await router.pause()
            await router.resume(1)
            assert (
                list(router.versions.lost()) == ["generator-0"]
                and "it is busy" in router.versions.lost()["generator-0"]
            )
            running = asyncio.gather(*(router.generate(request(f"r{i}", max_new_tokens=1)) for i in range(3)))
            await where([second], num_requests=3)
            await second.step()
            assert {c.versions.tolist()[0] for c in await running} == {1}
            assert first.bodies("/generate") == []
            second.faults.refuse(path, "it is busy too", status=200)
            with pytest.raises(NoGeneratorError, match="generator-0: .*it is busy.*; generator-1: .*busy too"):
                await router.pause()
                await router.resume(2)

    with SGLangDouble(samples=False) as first, SGLangDouble(samples=False) as second:
        asyncio.run(main())
