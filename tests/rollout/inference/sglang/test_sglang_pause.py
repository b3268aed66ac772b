"""What SGLangGenerator does with requests and weights between pause() and resume(), against the test double."""

import asyncio
from pathlib import Path

import pytest

from helpers.sglang_attached import at_the_server, attached, check, request
from helpers.sglang_double import model
from helpers.sglang_double.weights import Parameters
from rollout.bucket import FlatBucket
from rollout.errors import GeneratorCallError, GeneratorGone
from rollout.inference.router import Router

INTERRUPTS = ["abort", "retract", "in_place"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model.write(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("interrupt", ["retract", "in_place"])
async def test_tokens_of_a_request_that_runs_through_updates_carry_the_version_that_sampled_them(
    folder: Path, interrupt: str
) -> None:
    """The last answer is held back until one more version has come."""
    async with attached(folder, interrupt=interrupt) as (generator, double):
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
    assert len(double.bodies("/generate")) == 1
    assert [body["mode"] for body in double.bodies("/pause_generation")] == [interrupt] * 3


async def test_where_the_server_reports_no_versions_they_are_those_at_the_start_of_sampling(folder: Path) -> None:
    """Several pipeline stages. The request is made under version 0, and waits for version 1."""
    async with attached(folder, pp=2) as (generator, double):
        double.tells_versions = False
        router = Router([generator])
        await generator.pause()
        running = asyncio.create_task(router.generate(request("a", max_new_tokens=5)))
        while not (await generator.health()).num_waiting:
            await asyncio.sleep(0)
        await generator.resume(1)
        await double.until(at_the_server(1))
        await double.step(2)
        await generator.pause()
        await generator.resume(2)
        await double.until(at_the_server(1))
        await double.step(3)
        check(await running, [1] * 2 + [2] * 3)


async def test_an_answer_without_versions_is_an_error_where_updates_may_have_come_in_between(folder: Path) -> None:
    async with attached(folder, interrupt="retract") as (generator, double):
        double.tells_versions = False
        running = asyncio.create_task(generator.generate(request("a", max_new_tokens=1)))
        await double.until(at_the_server(1))
        await double.step()
        with pytest.raises(GeneratorCallError, match="generator-0: the server does not return token versions"):
            await running


@pytest.mark.parametrize("interrupt", INTERRUPTS)
async def test_a_request_made_while_the_server_is_being_paused_waits_for_the_next_version(folder, interrupt) -> None:
    async with attached(folder, interrupt=interrupt) as (generator, double):
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


async def test_an_abort_is_repeated_until_every_request_is_answered_and_pauses_only_then(folder: Path) -> None:
    """One request runs; another was sent and reaches the server after the first abort."""
    async with attached(folder) as (generator, double):
        router = Router([generator])
        first = asyncio.create_task(router.generate(request("first", max_new_tokens=5)))
        await double.until(at_the_server(1))
        await double.step(3)
        late = double.faults.hold_call("/generate")
        second = asyncio.create_task(router.generate(request("second", max_new_tokens=5)))
        await late.reached()
        pausing = asyncio.create_task(generator.pause())
        await double.until(lambda d: len(d.bodies("/abort_request")) > 1 or d.bodies("/pause_generation"))
        assert not pausing.done() and not double.bodies("/pause_generation")
        late.release()
        await pausing
        assert (await generator.health()).num_running == 0
        await generator.resume(1)
        await double.until(at_the_server(2))
        await double.step(5)
        check(await first, [0] * 3 + [1] * 2)
        check(await second, [1] * 5)
    (pause,) = [call for call in double.calls if call.path == "/pause_generation"]
    assert pause.num_requests == 0 and pause.body == {"mode": "in_place"}
    assert all(body == {"abort_all": True} for body in double.bodies("/abort_request"))


async def test_a_shared_gpu_s_server_is_flushed_when_it_is_idle_and_before_it_is_paused(folder: Path) -> None:
    async with attached(folder, colocated=True) as (generator, double):
        running = asyncio.create_task(generator.generate(request("a", max_new_tokens=5)))
        await double.until(at_the_server(1))
        await double.step(1)
        await generator.pause()
        check(await running, [0])
        await generator.release_memory(["kv_cache", "weights"])
        await generator.resume_memory(["weights"])
    paths = [call.path for call in double.calls if call.path not in ("/abort_request", "/generate")]
    assert paths == [
        "/continue_generation", "/flush_cache", "/pause_generation", "/release_memory_occupation",
        "/resume_memory_occupation",
    ]  # fmt: skip
    assert double.bodies("/release_memory_occupation") == [{"tags": ["kv_cache", "weights"]}]


async def test_weights_are_not_changed_while_requests_may_be_sampled(folder: Path) -> None:
    async with attached(folder) as (generator, double):
        for call in (
            lambda: generator.update_weights(FlatBucket.of(model.weights(1))),
            lambda: generator.release_memory(["weights"]),
        ):
            with pytest.raises(ValueError, match="needs pause"):
                await call()
    assert [call.path for call in double.calls] == ["/continue_generation"]


async def test_a_paused_server_is_healthy_while_its_scheduler_is_busy_with_weights(folder: Path) -> None:
    async with attached(folder) as (generator, double):
        double.faults.refuse("/slipstream_alive", "busy", times=2)
        with pytest.raises(GeneratorGone, match="is not healthy"):
            await generator.health()
        await generator.pause()
        assert (await generator.health()).version == 0
        double.faults.refuse("/model_info", "gone")
        with pytest.raises(GeneratorGone, match="is not healthy"):
            await generator.health()


@pytest.mark.parametrize("backwards", [False, True])
async def test_checksums_are_in_the_order_of_tensor_parallel_ranks(folder: Path, backwards: bool) -> None:
    async with attached(folder, tp=2) as (generator, double):
        double.ranks_backwards = backwards
        await generator.pause()
        await generator.update_weights(FlatBucket.of(model.weights(1)))
        expected = Parameters(model.weights(1), tp=2)
        checksums = await asyncio.to_thread(generator.endpoint.checksums, timeout_seconds=30)
        received = [{name: str(value) for name, value in rank.items()} for rank in checksums]
        assert received == [expected.checksums(0), expected.checksums(1)] and received[0] != received[1]
