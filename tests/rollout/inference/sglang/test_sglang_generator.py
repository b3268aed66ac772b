"""SGLangGenerator over HTTP against the test double, one token a step: what is asked, when, and under which version."""

import asyncio
import logging
from pathlib import Path

import pytest

from helpers.sglang_attached import at_the_server, attached, check, request, sampling_of
from helpers.sglang_double import model
from helpers.sglang_double.scheduler import token_at
from rollout.errors import GeneratorCallError, GeneratorGone
from rollout.inference.router import Router
from rollout.types import Completion


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model.write(tmp_path_factory.mktemp("model"))


async def test_after_an_abort_only_the_remaining_tokens_are_requested(folder: Path) -> None:
    async with attached(folder) as (generator, double):
        router = Router([generator])
        running = asyncio.create_task(router.generate(request("a", max_new_tokens=10)))
        for version, num_tokens in ((1, 4), (2, 1)):
            await double.until(at_the_server(1))
            await double.step(num_tokens)
            await generator.pause()
            await generator.resume(version)
        await double.until(at_the_server(1))
        assert sampling_of(double, "max_new_tokens") == [10, 6, 5]
        await double.step(5)
        completion = await running
        check(completion, [0] * 4 + [1] + [2] * 5)
        assert completion.finish_reason == "length"
    assert [body["input_ids"] for body in double.bodies("/generate")[:2]] == [
        [0, 1, 2, 3], [0, 1, 2, 3, *(token_at(i, 0) for i in range(4, 8))],
    ]  # fmt: skip
    assert len({body["rid"] for body in double.bodies("/generate")}) == 3, "every attempt has a name of its own"


async def test_after_an_abort_stop_tokens_stay_ruled_out_for_what_min_new_tokens_lacks(folder: Path) -> None:
    stop = token_at(8, 1)  # the fifth token, if it could be sampled
    async with attached(folder) as (generator, double):
        router = Router([generator])
        asked = request("a", max_new_tokens=10, min_new_tokens=6, stop_token_ids=(stop,))
        running = asyncio.create_task(router.generate(asked))
        await double.until(at_the_server(1))
        await double.step(2)
        await generator.pause()
        await generator.resume(1)
        for lengths in ([6, 4], [6, 4, 4]):
            while len(double.bodies("/generate")) < len(lengths):
                await asyncio.sleep(0.001)
            assert sampling_of(double, "max_new_tokens") == lengths
            await double.until(at_the_server(1))
            await double.step(4)
        completion = await running
        assert len(completion.token_ids) == 10 and stop not in completion.token_ids
    assert sampling_of(double, "ignore_eos") == [True, True, None]
    assert sampling_of(double, "logit_bias") == [{str(stop): -1e9}] * 2 + [None]
    assert sampling_of(double, "stop_token_ids") == [[stop]] * 3


@pytest.mark.parametrize("seed", [0, 7, 2**31 + 5, 2**62 + 12345, 2**63 - 1, 2**63 + 9])
async def test_a_deterministic_server_gets_63_bits_of_the_seed(folder: Path, seed: int) -> None:
    async with attached(folder, flags={"enable_deterministic_inference": True}) as (generator, double):
        running = asyncio.create_task(generator.generate(request("a", seed=seed, max_new_tokens=1)))
        await double.until(at_the_server(1))
        await double.step()
        await running
    assert sampling_of(double, "sampling_seed") == [seed % 2**63]


async def test_the_last_token_allowed_may_be_a_stop_token(folder: Path) -> None:
    """A SGLang server reports length."""
    async with attached(folder) as (generator, double):
        stop = (token_at(6, 0),)
        for length, reason in ((3, "stop"), (2, "length")):
            running = asyncio.create_task(generator.generate(request("a", max_new_tokens=length, stop_token_ids=stop)))
            await double.until(at_the_server(1))
            await double.step(length)
            completion = await running
            check(completion, [0] * length)
            assert completion.finish_reason == reason


async def test_what_requests_have_is_reported_token_by_token_while_they_run(folder: Path) -> None:
    async with attached(folder) as (generator, double):
        router = Router([generator])
        running = [asyncio.create_task(router.generate(request(f"r{i}", max_new_tokens=9 + i))) for i in range(3)]
        await double.until(at_the_server(3))
        await double.step(4)
        await generator.pause()
        assert {name: len(part.token_ids) for name, part in (await router.partial()).items()} == dict.fromkeys(
            ("r0", "r1", "r2"), 4
        )
        await generator.resume(1)
        await double.until(at_the_server(3))
        await double.step(2)
        told = await router.partial()
        assert told.keys() == {"r0", "r1", "r2"}
        for part in told.values():
            check(part, [0] * 4 + [1] * 2)
            assert part.finish_reason == "abort"
        await double.step(5)
        for i, completion in enumerate(await asyncio.gather(*running)):
            check(completion, [0] * 4 + [1] * (5 + i))
        assert await router.partial() == {}


async def test_a_server_that_does_not_report_its_requests_costs_the_tokens_since_they_were_sent(folder, caplog) -> None:
    async with attached(folder) as (generator, double):
        router = Router([generator])
        running = asyncio.create_task(router.generate(request("a", max_new_tokens=5)))
        await double.until(at_the_server(1))
        await double.step(3)
        await generator.pause()
        await generator.resume(1)
        await double.until(at_the_server(1))
        await double.step(1)
        double.faults.drop("/slipstream_in_flight")
        with caplog.at_level(logging.WARNING):
            check((await router.partial())["a"], [0] * 3)
        assert "A checkpoint lacks the new tokens of 1 running requests: generator-0" in caplog.text
        check((await router.partial())["a"], [0] * 3 + [1])
        await double.step(1)
        check(await running, [0] * 3 + [1] * 2)


async def test_a_cancelled_request_ends_at_the_server(folder: Path) -> None:
    async with attached(folder) as (generator, double):
        running = asyncio.create_task(generator.generate(request("a", max_new_tokens=100)))
        await double.until(at_the_server(1))
        running.cancel()
        await double.until(at_the_server(0))
        health = await generator.health()
        assert (health.num_running, health.num_waiting) == (0, 0) and await generator.partial() == {}


async def test_submitted_requests_come_out_once_each_and_failures_beside_them(folder: Path) -> None:
    async with attached(folder) as (generator, double):
        double.faults.refuse("/generate", "not this one")
        double.faults.drop("/generate")
        generator.submit([request(f"r{i}", max_new_tokens=1 + i % 3) for i in range(20)])
        await double.until(at_the_server(18))
        await double.step(3)
        done: list[tuple[str, Completion | Exception]] = []
        while len(done) < 20:
            done += await generator.drain()
        assert sorted(name for name, _ in done) == sorted(f"r{i}" for i in range(20))
        failures = {type(outcome): str(outcome) for _, outcome in done if isinstance(outcome, Exception)}
        assert failures.keys() == {GeneratorCallError, GeneratorGone}
        assert "generator-0: /generate failed (HTTP 400): not this one" in failures[GeneratorCallError]
        assert (
            "generator-0 (http://127.0.0.1:" in failures[GeneratorGone] and "is unreachable" in failures[GeneratorGone]
        )
        for name, outcome in done:
            if isinstance(outcome, Completion):
                check(outcome, [0] * (1 + int(name[1:]) % 3))
