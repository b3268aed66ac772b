"""The router over real embedded generators: balance, affinity, interruption, death."""

import asyncio
import logging
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from helpers import tiny_models
from helpers.chat_tokenizer import chat_tokenizer
from helpers.embedded_models import assert_same, bucket_of, engine_of, prompt, request, run
from rollout.data.encoder import Encoder
from rollout.inference.backend import GeneratorConfig
from rollout.inference.embedded.generator import EmbeddedGenerator
from rollout.inference.router import NoGeneratorError, Router, requests_at_once
from rollout.sessions.bridge import Bridge
from rollout.sessions.server import SessionServer
from rollout.sessions.session import Limits, Session
from rollout.types import Completion, GenerateRequest, Health, Prompt, SamplingParams

pytestmark = pytest.mark.timeout(120)  # of a test that hangs


class Recorded(EmbeddedGenerator):
    """An embedded generator that notes which requests it was given."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"max_running": 32, "interrupt": "abort", **settings})
        self.seen: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.seen.append(request)
        return await super().generate(request)


class Silent:
    """A generator whose process hangs: it takes everything and answers nothing."""

    async def generate(self, request: GenerateRequest) -> Completion:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def health(self) -> Health:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def close(self) -> None: ...


def groups_of_four(num_groups: int, **sampling: Any) -> list[GenerateRequest]:
    return [
        request(i, prompt(5 + i // 4, seed=i // 4), group_id=f"g{i // 4}", **{"max_new_tokens": 60, **sampling})
        for i in range(4 * num_groups)
    ]


@pytest.fixture(scope="module")
def expected(model: Any) -> list[Completion]:
    """The completions of groups_of_four(4, max_new_tokens=300)."""
    return run(engine_of(model), groups_of_four(4, max_new_tokens=300))


async def started(router: Router, requests: list[GenerateRequest]) -> list[asyncio.Future[Completion]]:
    """The requests, each of which has its place now and, unless it waits for a slot, some tokens."""
    running = [asyncio.ensure_future(router.generate(r)) for r in requests]
    await asyncio.sleep(0)
    probes = [request(10_000 + i, prompt(3), max_new_tokens=8, group_id=r.group_id) for i, r in enumerate(requests)]
    await asyncio.gather(*(router.generate(probe) for probe in probes))
    return running


async def test_groups_stay_together_and_load_is_spread(folder: Path, model: Any) -> None:
    generators = [Recorded(folder) for _ in range(3)]
    router = Router(generators)
    requests = groups_of_four(9)
    completions = await asyncio.gather(*(router.generate(r) for r in requests))
    for c, expected in zip(completions, run(engine_of(model), requests), strict=True):
        assert_same(c, expected)
    homes = [{r.group_id for r in g.seen} for g in generators]
    assert [len(home) for home in homes] == [3, 3, 3]
    assert not homes[0] & homes[1] and not homes[1] & homes[2] and not homes[0] & homes[2]
    await router.close()


class Turns(Silent):
    """A generator that ends every answer at once, until it dies."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.is_dead = False

    async def generate(self, request: GenerateRequest) -> Completion:
        if self.is_dead:
            raise ConnectionResetError
        self.seen.append(request.group_id)
        await asyncio.sleep(0.01)
        one = np.zeros(1, np.int32)
        return Completion(token_ids=one, logprobs=one.astype(np.float32), versions=one, finish_reason="stop")

    async def health(self) -> Health:
        if self.is_dead:
            raise ConnectionResetError
        return Health(version=0, num_running=0, num_waiting=0)


async def test_the_turns_of_a_session_go_where_its_prefix_is_and_to_another_generator_when_that_is_lost(
    tmp_path: Path,
) -> None:
    tokenizer = chat_tokenizer()
    tiny_models.make_model("qwen2", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    bridge = Bridge(Encoder(tokenizer))
    limits = Limits(sampling=SamplingParams(max_new_tokens=8), context_tokens=2000)
    asked = Prompt(query_id="q", index=1, task="t", text="?", token_ids=np.array([5], np.int32), solutions=())

    async def talk(generators: list[Recorded], lost: Recorded | None = None) -> list[list[int]]:
        """Let four sessions take turns; one generator dies in the last. Return what each trains."""
        router, server = Router(generators), SessionServer()
        await server.start()
        sessions = [Session(bridge, router, asked, number=i, seed=1, limits=limits) for i in range(4)]
        said: list[list[Any]] = [[{"role": "user", "content": f"{i}?"}] for i in range(4)]
        for i, session in enumerate(sessions):
            server.open(f"key {i}", session)

        async def turn(i: int) -> None:
            body, key = {"model": "policy", "messages": said[i]}, {"Authorization": f"Bearer key {i}"}
            async with http.post(f"{server.url}/v1/chat/completions", json=body, headers=key) as response:
                answer = (await response.json())["choices"][0]["message"]
            said[i] += [answer, {"role": "user", "content": "And?"}]

        async with aiohttp.ClientSession() as http:
            await asyncio.gather(*map(turn, range(4)))
            for i in range(4):
                await turn(i)  # alone: the other generator has nothing to do
            homes = [{request.group_id for request in generator.seen} for generator in generators]
            if lost is not None:
                assert [len(home) for home in homes] == [2, 2] and not homes[0] & homes[1]
                num_seen = len(lost.seen)
            turns = asyncio.gather(*map(turn, range(4)))
            if lost is not None:
                while len(lost.seen) < num_seen + 2:
                    await asyncio.sleep(0)
                await lost.close()
            await turns
            await asyncio.gather(*map(turn, range(4)))
        await server.close()
        await router.close()
        trajectories = [trajectory for session in sessions for trajectory in session.trajectories(1.0, {})]
        assert len(trajectories) == 4, "each turn continues its conversation"
        return [trajectory.token_ids.tolist() for trajectory in trajectories]

    undisturbed = await talk([Recorded(tmp_path)])
    first, second = Recorded(tmp_path), Recorded(tmp_path)
    assert await talk([first, second], lost=first) == undisturbed


async def test_the_next_turn_of_a_conversation_leaves_a_generator_that_is_reserved() -> None:
    """A reserved generator keeps its weights: what it sampled for training would be too old."""
    first, second = generators = [Turns(), Turns()]
    router = Router({"first": first, "second": second}, GeneratorConfig(patience_seconds=30.0))
    turn = GenerateRequest(request_id="a", group_id="a", prompt_ids=[1], sampling=SamplingParams(max_new_tokens=8))
    await router.generate(turn)
    assert [g.seen for g in generators] == [["a"], []]
    reserved = router.reserved("first")
    await router.generate(turn)
    await reserved.generate(replace(turn, group_id="evaluation"))
    assert [g.seen for g in generators] == [["a", "evaluation"], ["a"]]
    second.is_dead = True
    waits = asyncio.ensure_future(router.generate(turn))
    await asyncio.sleep(0.05)
    assert not waits.done()
    router.release("first")
    await waits
    assert first.seen == ["a", "evaluation", "a"]
    await router.close()


async def test_long_requests_weigh_more_than_short_ones(folder: Path) -> None:
    generators = [Recorded(folder) for _ in range(2)]
    router = Router(generators)
    sizes = [400, 40, 40, 40, 40]
    await asyncio.gather(*(router.generate(request(i, prompt(5), max_new_tokens=n)) for i, n in enumerate(sizes)))
    assert [[r.sampling.max_new_tokens for r in g.seen] for g in generators] == [[400], [40] * 4]
    await router.close()


@pytest.mark.parametrize("interrupt", ["abort", "retract", "in_place"])
async def test_interrupted_requests_continue_with_their_prefix_and_lose_no_token(
    folder, model, expected, interrupt
) -> None:
    generators = [Recorded(folder, interrupt=interrupt) for _ in range(2)]
    router = Router(generators)
    requests = groups_of_four(3, max_new_tokens=300)
    running = await started(router, requests)
    for version in (1, 2, 3):
        await router.generate(request(1000 + version, prompt(3), max_new_tokens=4))
        await asyncio.gather(*(g.pause() for g in generators))
        await asyncio.sleep(0.01)
        assert not any(r.done() for r in running)
        for generator in generators:
            await generator.update_weights(bucket_of(model))
            await generator.resume(version)
    for c, whole in zip(await asyncio.gather(*running), expected[: len(requests)], strict=True):
        assert_same(c, whole, versions=False)
        assert (c.versions[1:] >= c.versions[:-1]).all()
        assert c.versions[0] == 0
        assert c.versions[-1] == 3
    assert any(r.output is not None for g in generators for r in g.seen) == (interrupt == "abort")
    await router.close()


async def test_requests_of_a_generator_that_dies_continue_elsewhere_and_the_reason_is_reported_once(
    folder: Path, expected: list[Completion], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    generators = [Recorded(folder) for _ in range(2)]
    router = Router(generators)
    requests = groups_of_four(4, max_new_tokens=300)
    running = await started(router, requests)
    await generators[0].close()
    for c, whole in zip(await asyncio.gather(*running), expected[: len(requests)], strict=True):
        assert_same(c, whole)
    moved = Counter(r.request_id for g in generators for r in g.seen)
    assert [moved[r.request_id] for r in requests] == [2] * 4 + [1] * 4 + [2] * 4 + [1] * 4
    for r in groups_of_four(2):
        assert len((await router.generate(r)).token_ids) == 60
    await router.close()
    (reported,) = (r.getMessage() for r in caplog.records if r.levelno == logging.ERROR)
    assert re.fullmatch(r"generator-0 failed \(.*closed.*\); its requests continue elsewhere", reported)


async def test_an_aborted_request_keeps_its_tokens_when_its_generator_dies_before_going_on(
    folder: Path, expected
) -> None:
    generators = [Recorded(folder) for _ in range(2)]
    router = Router(generators)
    requests = groups_of_four(2, max_new_tokens=300)
    running = await started(router, requests)
    await asyncio.gather(*(g.pause() for g in generators))
    await generators[1].close()
    await generators[0].resume(1)
    for c, whole in zip(await asyncio.gather(*running), expected[: len(requests)], strict=True):
        assert_same(c, whole, versions=False)
        assert set(c.versions.tolist()) <= {0, 1}
    late = [r for r in generators[0].seen if r.group_id == "g1"]
    assert late
    assert all(r.output is not None and len(r.output.token_ids) for r in late)
    await router.close()


async def test_requests_of_a_generator_that_dies_keep_what_it_told_of_them(
    folder: Path, expected: list[Completion]
) -> None:
    generators = [Recorded(folder) for _ in range(2)]
    router = Router(generators)
    requests = groups_of_four(2, max_new_tokens=300)
    running = await started(router, requests)
    told = await router.partial()
    await generators[1].close()
    for c, whole in zip(await asyncio.gather(*running), expected[: len(requests)], strict=True):
        assert_same(c, whole)
    late = [r for r in generators[0].seen if r.group_id == "g1" and r.request_id in told]
    assert len(late) == 4
    for r in late:
        assert r.output is not None
        assert len(r.output.token_ids) and (r.output.token_ids == told[r.request_id].token_ids).all()
    await router.close()


async def test_a_generator_that_answers_nothing_is_left_for_one_that_does(folder: Path, model: Any) -> None:
    generators = [Silent(), Recorded(folder)]
    router = Router(
        generators, GeneratorConfig(health_interval_seconds=0.05, health_timeout_seconds=2.0, patience_seconds=0.0)
    )
    requests = groups_of_four(2)
    completions = await asyncio.gather(*(router.generate(r) for r in requests))
    for c, expected in zip(completions, run(engine_of(model), requests), strict=True):
        assert_same(c, expected)
    await router.close()


async def test_without_any_generator_left_a_request_fails(folder: Path) -> None:
    generators = [Recorded(folder) for _ in range(2)]
    router = Router(generators)
    running = await started(router, groups_of_four(3, max_new_tokens=400))
    await asyncio.gather(*(g.close() for g in generators))
    for outcome in await asyncio.gather(*running, return_exceptions=True):
        assert isinstance(outcome, NoGeneratorError)
    with pytest.raises(NoGeneratorError, match="generator-0: .*closed.*; generator-1: .*closed"):
        await router.generate(request(2, prompt(3)))
    await router.close()


async def test_with_none_left_requests_wait_for_one_that_takes_the_place_of_another(
    folder: Path, expected: list[Completion]
) -> None:
    first, second = Recorded(folder), Recorded(folder)
    router = Router([first], GeneratorConfig(patience_seconds=60.0))
    requests = groups_of_four(2, max_new_tokens=300)
    running = await started(router, requests)
    await first.close()
    late = asyncio.ensure_future(router.generate(groups_of_four(3)[-1]))
    while not router.lost:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert not late.done() and not any(r.done() for r in running)
    router.replace("generator-0", second)
    for c, whole in zip(await asyncio.gather(*running), expected[: len(requests)], strict=True):
        assert_same(c, whole)
    assert len((await late).token_ids) == 60
    assert router.lost == {}
    await router.close()


async def test_a_slow_generator_is_reported_and_keeps_its_requests(folder: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr("rollout.inference.router._LEAST_SECONDS_TO_JUDGE", 0.0)

    router = Router([Recorded(folder) for _ in range(2)])
    await router.generate(request(0, prompt(5), max_new_tokens=100))
    stats = router.stats()
    assert stats == {"router/num_generators": 2.0, "router/num_old_prefix_tokens": 0.0, "router/slowest_share": 0.0}
    assert "generator-1 is slow: 0 tokens/s" in caplog.text
    await asyncio.gather(*(router.generate(request(i, prompt(5))) for i in (1, 2)))
    assert router.stats()["router/slowest_share"] > 0
    assert router.lost == {}
    await router.close()


async def test_a_request_that_cannot_be_served_blames_no_generator(folder: Path, caplog) -> None:
    router = Router([Recorded(folder)])
    with caplog.at_level("WARNING"), pytest.raises(ValueError, match="exceed the 512 positions"):
        await router.generate(request(0, prompt(500), max_new_tokens=100))
    assert "failed" not in caplog.text
    assert len((await router.generate(request(1, prompt(5)))).token_ids) == 16
    await router.close()


async def test_a_cancelled_request_leaves_no_load_behind(folder: Path) -> None:
    generators = [Recorded(folder) for _ in range(2)]
    router = Router(generators)
    hog = asyncio.ensure_future(router.generate(request(0, prompt(5), max_new_tokens=500)))
    await asyncio.sleep(0)
    await router.generate(request(1, prompt(5)))
    hog.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hog
    await router.generate(request(2, prompt(5)))
    assert [r.request_id for r in generators[0].seen] == ["r0", "r2"]
    await router.close()


@pytest.mark.parametrize("max_running", [1, 8, 128])
@pytest.mark.parametrize("num_generators", [1, 3, 8])
@pytest.mark.parametrize("group_size", [1, 8, 32])
def test_so_many_requests_are_kept_under_way_that_every_generator_is_full_or_has_a_group(
    max_running: int, num_generators: int, group_size: int
) -> None:
    at_once = requests_at_once(max_running=max_running, num_generators=num_generators, group_size=group_size)
    assert at_once > max_running * num_generators
    assert -(-at_once // group_size) >= num_generators, "groups that begin while fewer requests are under way"


class Scripted(Silent):
    """A generator whose attempts end as in `ends`: "token" or "abort" (with or without a token), "failure", "stop"."""

    def __init__(self, *ends: str) -> None:
        self._ends = iter(ends)

    async def generate(self, request: GenerateRequest) -> Completion:
        end, given = next(self._ends), request.output
        if end == "failure":
            raise ConnectionResetError
        n = (end != "abort") + (0 if given is None else len(given.token_ids))
        reason = "stop" if end == "stop" else "abort"
        return Completion(
            token_ids=np.arange(n, dtype=np.int32), logprobs=np.zeros(n, np.float32), versions=np.zeros(n, np.int32),
            finish_reason=reason,
        )  # fmt: skip

    async def partial(self) -> dict[str, Completion]:
        return {}

    async def health(self) -> Health:
        return Health(version=0, num_running=1, num_waiting=0)


class Dead(Silent):
    """A generator whose process is gone."""

    async def generate(self, request: GenerateRequest) -> Completion:
        raise ConnectionResetError

    async def health(self) -> Health:
        raise ConnectionResetError


@pytest.mark.virtual_clock
async def test_patience_begins_anew_with_each_time_that_no_generator_is_left() -> None:
    router = Router([Dead()], GeneratorConfig(patience_seconds=3.0))
    running = asyncio.ensure_future(router.generate(request(0, prompt(5))))
    for following in (Dead(), Scripted("stop")):
        await asyncio.sleep(1.8)
        assert not running.done()
        router.replace("generator-0", following)
    assert (await running).finish_reason == "stop"


async def test_failures_are_counted_since_the_last_token_and_interruptions_are_none() -> None:
    ends = [*["failure"] * 3, "token", *["failure"] * 3, *["token"] * 5, "failure", "stop"]
    completion = await Router([Scripted(*ends)]).generate(request(0, prompt(5)))
    assert completion.finish_reason == "stop" and len(completion.token_ids) == 7
    with pytest.raises(ConnectionResetError):
        await Router([Scripted("token", *["failure"] * 4, "stop")]).generate(request(0, prompt(5)))


@pytest.mark.virtual_clock
async def test_a_generator_that_aborts_without_a_token_is_called_less_and_less_often() -> None:
    async def seconds(*ends: str) -> float:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        await Router([Scripted(*ends, "stop")]).generate(request(0, prompt(5)))
        return loop.time() - begin

    assert await seconds(*["token"] * 12) == pytest.approx(0.0, abs=0.01)
    assert await seconds(*["abort"] * 12) > 5.0


class AnswerLost(Silent):
    """A generator that has finished a request, as partial() reports, and dies before its answer arrives."""

    def __init__(self, finished: Completion) -> None:
        self._finished, self.dies = finished, asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Completion:
        await self.dies.wait()
        raise ConnectionResetError

    async def partial(self) -> dict[str, Completion]:
        return {"r0": self._finished}

    async def health(self) -> Health:
        raise ConnectionResetError


@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_a_completion_that_was_reported_as_finished_is_the_answer_when_its_generator_dies(reason: Any) -> None:
    finished = Completion(
        token_ids=np.arange(3, dtype=np.int32), logprobs=np.zeros(3, np.float32), versions=np.zeros(3, np.int32),
        finish_reason=reason,
    )  # fmt: skip
    first = AnswerLost(finished)
    router = Router([first, Scripted()])
    running = asyncio.ensure_future(router.generate(request(0, prompt(5))))
    await asyncio.sleep(0)
    assert (await router.partial())["r0"] is finished
    first.dies.set()
    assert await running is finished, "no other generator continues it"
