"""SGLangGenerator over HTTP against the test double, one token a step: what is asked, when, and under which version."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sglang_attached import generator_on, request
from sglang_double import model
from sglang_double.scheduler import TOKENS_PER_VERSION, logprob_of, token_at
from sglang_double.server import SGLangDouble
from sglang_double.weights import Parameters

from rollout.router import Router
from rollout.sglang_generator import SGLangGenerator
from rollout.sglang_weights import ServerError, ServerGone
from rollout.types import Completion, WeightBucket

INTERRUPTS = ["abort", "retract", "in_place"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model.write(tmp_path_factory.mktemp("model"))


def run(use: Callable[[SGLangGenerator, SGLangDouble], Awaitable[None]], folder: Path, **settings: Any) -> SGLangDouble:
    """`use` a generator whose weights are of version 0; the double afterwards."""

    async def main() -> None:
        async with generator_on(double, folder, **settings) as generator:
            await generator.resume(0)
            await use(generator, double)

    with SGLangDouble(tp=settings.get("tp", 1), samples=False) as double:
        asyncio.run(main())
    return double


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


def test_after_an_abort_only_the_remaining_tokens_are_requested(folder: Path) -> None:
    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
        router = Router([generator])
        running = asyncio.create_task(router.generate(request("a", max_new_tokens=10)))
        for version, num_tokens in ((1, 4), (2, 1)):
            await double.until(at_the_server(1))
            await double.step(num_tokens)
            await router.pause()
            await router.resume(version)
        await double.until(at_the_server(1))
        await double.step(5)
        completion = await running
        check(completion, [0] * 4 + [1] + [2] * 5)
        assert completion.finish_reason == "length"

    double = run(use, folder)
    assert sampling_of(double, "max_new_tokens") == [10, 6, 5]
    assert [body["input_ids"] for body in double.bodies("/generate")[:2]] == [
        [0, 1, 2, 3], [0, 1, 2, 3, *(token_at(i, 0) for i in range(4, 8))],
    ]  # fmt: skip
    assert len({body["rid"] for body in double.bodies("/generate")}) == 3, "every attempt has a name of its own"


def test_after_an_abort_stop_tokens_stay_ruled_out_for_what_min_new_tokens_lacks(folder: Path) -> None:
    stop = token_at(8, 1)  # the fifth token, if it could be sampled

    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
        router = Router([generator])
        asked = request("a", max_new_tokens=10, min_new_tokens=6, stop_token_ids=(stop,))
        running = asyncio.create_task(router.generate(asked))
        await double.until(at_the_server(1))
        await double.step(2)
        await router.pause()
        await router.resume(1)
        for _ in range(2):
            await double.until(at_the_server(1))
            await double.step(4)
        completion = await running
        assert len(completion.token_ids) == 10 and stop not in completion.token_ids

    double = run(use, folder)
    assert sampling_of(double, "max_new_tokens") == [6, 4, 4]
    assert sampling_of(double, "ignore_eos") == [True, True, None]
    assert sampling_of(double, "logit_bias") == [{str(stop): -1e9}] * 2 + [None]
    assert sampling_of(double, "stop_token_ids") == [[stop]] * 3


@pytest.mark.parametrize("seed", [0, 7, 2**31 + 5, 2**62 + 12345, 2**63 - 1, 2**63 + 9])
def test_a_deterministic_server_gets_63_bits_of_the_seed(folder: Path, seed: int) -> None:
    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
        running = asyncio.create_task(generator.generate(request("a", seed=seed, max_new_tokens=1)))
        await double.until(at_the_server(1))
        await double.step()
        await running

    double = run(use, folder, flags={"enable_deterministic_inference": True})
    assert sampling_of(double, "sampling_seed") == [seed % 2**63]


@pytest.mark.parametrize("interrupt", ["retract", "in_place"])
def test_tokens_of_a_request_that_runs_through_updates_carry_the_version_that_sampled_them(
    folder: Path, interrupt: str
) -> None:
    """The last answer is held back until one more version has come."""

    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
        held = double.faults.hold_answer("/generate")
        running = asyncio.create_task(generator.generate(request("a", max_new_tokens=9)))
        await double.until(at_the_server(1))
        for version in (1, 2, 3):
            await double.step(3)
            await generator.pause()
            await double.step(5)  # without effect
            await generator.resume(version)
        await held.reached()
        held.release()
        check(await running, [0] * 3 + [1] * 3 + [2] * 3)

    double = run(use, folder, interrupt=interrupt)
    assert len(double.bodies("/generate")) == 1
    assert [body["mode"] for body in double.bodies("/pause_generation")] == [interrupt] * 3


def test_where_the_server_reports_no_versions_they_are_those_at_the_start_of_sampling(folder: Path) -> None:
    """Several pipeline stages. The request is made under version 0, and waits for version 1."""

    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
        double.tells_versions = False
        router = Router([generator])
        await generator.pause()
        running = asyncio.create_task(router.generate(request("a", max_new_tokens=5)))
        while not (await generator.health()).num_waiting:
            await asyncio.sleep(0)
        await generator.resume(1)
        await double.until(at_the_server(1))
        await double.step(2)
        await router.pause()
        await router.resume(2)
        await double.until(at_the_server(1))
        await double.step(3)
        check(await running, [1] * 2 + [2] * 3)

    run(use, folder, pp=2)


def test_an_answer_without_versions_is_an_error_where_updates_may_have_come_in_between(folder: Path) -> None:
    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
        double.tells_versions = False
        running = asyncio.create_task(generator.generate(request("a", max_new_tokens=1)))
        await double.until(at_the_server(1))
        await double.step()
        with pytest.raises(ServerError, match="generator-0: the server does not tell the versions"):
            await running

    run(use, folder, interrupt="retract")


@pytest.mark.parametrize("interrupt", INTERRUPTS)
def test_a_request_made_while_the_server_is_being_paused_waits_for_the_next_version(
    folder: Path, interrupt: str
) -> None:
    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
        held = double.faults.hold_answer("/pause_generation")
        pausing = asyncio.create_task(generator.pause())
        await held.reached()
        running = asyncio.create_task(generator.generate(request("a", max_new_tokens=2)))
        health = await generator.health()
        while not health.num_waiting + health.num_running:
            health = await generator.health()
        assert (health.num_waiting, health.num_running) == (1, 0)
        held.release()
        await pausing
        assert double.bodies("/generate") == []
        await generator.resume(5)
        await double.until(at_the_server(1))
        await double.step(2)
        check(await running, [5, 5])

    run(use, folder, interrupt=interrupt)


def test_an_abort_is_repeated_until_every_request_is_answered_and_pauses_only_then(folder: Path) -> None:
    """One request runs; another was sent and reaches the server after the first abort."""

    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
        router = Router([generator])
        first = asyncio.create_task(router.generate(request("first", max_new_tokens=5)))
        await double.until(at_the_server(1))
        await double.step(3)
        late = double.faults.hold_call("/generate")
        second = asyncio.create_task(router.generate(request("second", max_new_tokens=5)))
        await late.reached()
        pausing = asyncio.create_task(router.pause())
        await double.until(lambda d: len(d.bodies("/abort_request")) > 1 or d.bodies("/pause_generation"))
        assert not pausing.done() and not double.bodies("/pause_generation")
        late.release()
        await pausing
        assert (await generator.health()).num_running == 0
        await router.resume(1)
        await double.until(at_the_server(2))
        await double.step(5)
        check(await first, [0] * 3 + [1] * 2)
        check(await second, [1] * 5)

    double = run(use, folder)
    (pause,) = [call for call in double.calls if call.path == "/pause_generation"]
    assert pause.num_requests == 0 and pause.body == {"mode": "in_place"}
    assert all(body == {"abort_all": True} for body in double.bodies("/abort_request"))


@pytest.mark.parametrize("interrupt", ["retract", "in_place"])
def test_a_request_that_reaches_a_paused_server_samples_with_the_next_version_alone(
    folder: Path, interrupt: str
) -> None:
    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
        late = double.faults.hold_call("/generate")
        running = asyncio.create_task(generator.generate(request("a", max_new_tokens=2)))
        await late.reached()
        await generator.pause()
        late.release()
        await double.until(lambda d: d.bodies("/generate"))
        await double.step(5)
        await generator.resume(1)
        await double.until(at_the_server(1))
        await double.step(2)
        check(await running, [1, 1])

    run(use, folder, interrupt=interrupt)


def test_a_shared_gpu_s_server_is_flushed_when_it_is_idle_and_before_it_is_paused(folder: Path) -> None:
    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
        running = asyncio.create_task(generator.generate(request("a", max_new_tokens=5)))
        await double.until(at_the_server(1))
        await double.step(1)
        await generator.pause()
        check(await running, [0])
        await generator.release_memory(["kv_cache", "weights"])
        await generator.resume_memory(["weights"])

    double = run(use, folder, colocated=True)
    paths = [call.path for call in double.calls if call.path not in ("/abort_request", "/generate")]
    assert paths == [
        "/continue_generation", "/flush_cache", "/pause_generation", "/release_memory_occupation",
        "/resume_memory_occupation",
    ]  # fmt: skip
    assert double.bodies("/release_memory_occupation") == [{"tags": ["kv_cache", "weights"]}]


@pytest.mark.parametrize("status", [200, 400])
def test_a_refused_update_is_an_error_that_names_server_path_and_message(folder: Path, status: int) -> None:
    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
        await generator.pause()
        for path, call in (
            ("/update_weights_from_disk", lambda: generator.load_folder("/weights")),
            ("/update_weights_from_tensor", lambda: generator.update_weights(WeightBucket(tensors=model.weights(1)))),
            ("/weights_checker", generator.checksums),
        ):
            double.faults.refuse(path, "no room for it", status=status)
            with pytest.raises(ServerError, match=rf"^generator-0: {path} failed \(HTTP {status}\): no room for it$"):
                await call()

    run(use, folder)


def test_weights_are_not_changed_while_requests_may_be_sampled(folder: Path) -> None:
    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
        for call in (
            lambda: generator.load_folder("/weights"),
            lambda: generator.update_weights(WeightBucket(tensors=model.weights(1))),
            lambda: generator.release_memory(["weights"]),
        ):
            with pytest.raises(ValueError, match="needs pause"):
                await call()

    double = run(use, folder)
    assert [call.path for call in double.calls] == ["/continue_generation"]


def test_a_generator_that_could_not_go_on_keeps_its_version_and_its_requests(folder: Path) -> None:
    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
        await generator.pause()
        double.faults.refuse("/continue_generation", "still busy")
        with pytest.raises(ServerError, match="still busy"):
            await generator.resume(3)
        assert (await generator.health()).version == 0
        running = asyncio.create_task(generator.generate(request("a", max_new_tokens=1)))
        while not (await generator.health()).num_waiting:
            await asyncio.sleep(0)
        await generator.resume(4)
        assert (await generator.health()).version == 4
        await double.until(at_the_server(1))
        await double.step()
        check(await running, [4])

    run(use, folder)


@pytest.mark.parametrize("backwards", [False, True])
def test_checksums_are_in_the_order_of_tensor_parallel_ranks(folder: Path, backwards: bool) -> None:
    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
        double.ranks_backwards = backwards
        await generator.pause()
        await generator.update_weights(WeightBucket(tensors=model.weights(1)))
        expected = Parameters(model.weights(1), tp=2)
        received = [{name: str(value) for name, value in rank.items()} for rank in await generator.checksums()]
        assert received == [expected.checksums(0), expected.checksums(1)] and received[0] != received[1]

    run(use, folder, tp=2)


def test_the_last_token_allowed_may_be_a_stop_token(folder: Path) -> None:
    """A SGLang server reports length."""

    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
        stop = (token_at(6, 0),)
        for length, reason in ((3, "stop"), (2, "length")):
            running = asyncio.create_task(generator.generate(request("a", max_new_tokens=length, stop_token_ids=stop)))
            await double.until(at_the_server(1))
            await double.step(length)
            completion = await running
            check(completion, [0] * length)
            assert completion.finish_reason == reason

    run(use, folder)


def test_what_requests_have_is_reported_token_by_token_while_they_run(folder: Path) -> None:
    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
        router = Router([generator])
        running = [asyncio.create_task(router.generate(request(f"r{i}", max_new_tokens=9 + i))) for i in range(3)]
        await double.until(at_the_server(3))
        await double.step(4)
        await router.pause()
        assert {name: len(part.token_ids) for name, part in (await router.partial()).items()} == dict.fromkeys(
            ("r0", "r1", "r2"), 4
        )
        await router.resume(1)
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

    run(use, folder)


def test_a_server_that_does_not_report_its_requests_costs_the_tokens_since_they_were_sent(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
        router = Router([generator])
        running = asyncio.create_task(router.generate(request("a", max_new_tokens=5)))
        await double.until(at_the_server(1))
        await double.step(3)
        await router.pause()
        await router.resume(1)
        await double.until(at_the_server(1))
        await double.step(1)
        double.faults.drop("/slipstream_in_flight")
        with caplog.at_level(logging.WARNING):
            check((await router.partial())["a"], [0] * 3)
        assert "lacks what 1 requests sampled since they were sent: generator-0" in caplog.text
        check((await router.partial())["a"], [0] * 3 + [1])
        await double.step(1)
        check(await running, [0] * 3 + [1] * 2)

    run(use, folder)


def test_a_cancelled_request_ends_at_the_server(folder: Path) -> None:
    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
        running = asyncio.create_task(generator.generate(request("a", max_new_tokens=100)))
        await double.until(at_the_server(1))
        running.cancel()
        await double.until(at_the_server(0))
        health = await generator.health()
        assert (health.num_running, health.num_waiting) == (0, 0) and await generator.partial() == {}

    run(use, folder)


def test_submitted_requests_come_out_once_each_and_failures_beside_them(folder: Path) -> None:
    async def use(generator: SGLangGenerator, double: SGLangDouble) -> None:
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
        assert failures.keys() == {ServerError, ServerGone}
        assert "generator-0: /generate failed (HTTP 400): not this one" in failures[ServerError]
        assert "generator-0 (http://127.0.0.1:" in failures[ServerGone] and "is gone" in failures[ServerGone]
        for name, outcome in done:
            if isinstance(outcome, Completion):
                check(outcome, [0] * (1 + int(name[1:]) % 3))

    run(use, folder)


def test_the_tokens_of_the_double_show_their_version() -> None:
    tokens = np.array([token_at(position, version) for version in range(10) for position in range(100)])
    assert (tokens // TOKENS_PER_VERSION == np.repeat(np.arange(10), 100)).all()
