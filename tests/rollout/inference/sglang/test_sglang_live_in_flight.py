"""What a real SGLang server on the CPU tells of requests in flight is what they end with, and what a restart goes on
from."""

import asyncio
import pickle
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.sglang_environment import END, PYTHON, WHY_NOT, Models

if PYTHON is None:
    pytest.skip(WHY_NOT, allow_module_level=True)
pytest.importorskip("aiohttp", reason="aiohttp is not installed (extra gpu)")

from helpers.sglang_live import TOLERANCE, models, prompt_of, request, server, update, with_generator  # noqa: E402
from rollout.experience import MemoryExperience, Schedule, StalenessAdmission, Tags  # noqa: E402
from rollout.inference.router import Router  # noqa: E402
from rollout.inference.sglang.generator import SGLangGenerator  # noqa: E402
from rollout.inference.sglang.server import SGLangServer  # noqa: E402
from rollout.journal import JournaledSampler  # noqa: E402
from rollout.types import Completion, GenerateRequest  # noqa: E402

__all__ = ["models", "server"]  # fixtures

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cut": {"top_p": 0.8, "top_k": 50, "temperature": 0.7},
    "certain": {"top_k": 1},
    "greedy": {"temperature": 0.0},
    "after a minimum": {"min_new_tokens": 20},
}
LENGTH = 900


def long_requests() -> list[GenerateRequest]:
    """Of every kind two, which take some seconds."""
    kinds = {f"{kind}-{i}": sampling for kind, sampling in KINDS.items() for i in range(2)}
    return [
        request(name, prompt_of(i, 10 + i), max_new_tokens=LENGTH, **sampling)
        for i, (name, sampling) in enumerate(kinds.items())
    ]


async def told_when_all_have(router: Router, num_tokens: int, *, version: int, num: int) -> Mapping[str, Completion]:
    """What is in flight, once `num` requests have so many tokens, the last ones of this version."""
    async with asyncio.timeout(60):
        while True:
            told = await router.partial()
            ready = [p for p in told.values() if len(p.token_ids) >= num_tokens and p.versions[-1] == version]
            if len(ready) >= num:
                return told
            await asyncio.sleep(0.02)


def is_prefix(part: Completion, whole: Completion) -> bool:
    n = len(part.token_ids)
    return n < len(whole.token_ids) and all(
        np.array_equal(getattr(part, name), getattr(whole, name)[:n]) for name in ("token_ids", "logprobs", "versions")
    )


@pytest.mark.parametrize("interrupt", ["in_place", "retract", "abort"])
def test_what_is_told_midway_is_the_beginning_of_the_answer_token_by_token(server, models, interrupt) -> None:
    requests = long_requests()

    async def ask_twice(generator: SGLangGenerator) -> tuple[list[Mapping[str, Completion]], list[Completion]]:
        router = Router([generator])
        await update(generator, models, 1)
        running = [asyncio.create_task(router.generate(r)) for r in requests]
        before = await told_when_all_have(router, 40, version=1, num=len(requests))
        await update(generator, models, 2)
        after = await told_when_all_have(router, 60, version=2, num=len(requests))
        answers = await asyncio.gather(*running)
        assert await router.partial() == {}
        return [before, after], answers

    told, answers = with_generator(server, interrupt, ask_twice)
    for parts in told:
        assert parts.keys() == {r.request_id for r in requests}
        for r, answer in zip(requests, answers, strict=True):
            part = parts[r.request_id]
            assert part.finish_reason == "abort" and is_prefix(part, answer), r.request_id
    assert {tuple(np.unique(part.versions)) for part in told[1].values()} == {(1, 2)}


@pytest.mark.parametrize("interrupt", ["in_place", "retract"])
def test_a_recovered_prompt_goes_on_from_the_tokens_that_the_server_had(server, models, interrupt) -> None:
    prompt = prompt_of(3, 12)
    asked = request("first life", prompt, max_new_tokens=LENGTH, min_new_tokens=LENGTH, stop_token_ids=(END,))

    async def until_the_checkpoint(generator: SGLangGenerator) -> bytes:
        router = Router([generator])
        experience = MemoryExperience()
        tags = Tags(id="e", group_id="e", task="", row="e", epoch=0, version=0)
        assert experience.open(tags, StalenessAdmission(Schedule(num_prompts=1, batch_size=1), 0)) == "open"
        journal = JournaledSampler(router, experience, "e")
        await update(generator, models, 1)
        running = asyncio.create_task(journal.generate(asked))
        await told_when_all_have(router, 30, version=1, num=1)
        await update(generator, models, 2)
        await told_when_all_have(router, 60, version=2, num=1)
        journal.record_partial(await router.partial())
        running.cancel()
        return pickle.dumps(experience.state_dict())

    def restarted() -> MemoryExperience:
        experience = MemoryExperience()
        experience.load_state_dict(pickle.loads(saved))
        return experience

    async def after_the_restart(generator: SGLangGenerator) -> Completion:
        router = Router([generator])
        await update(generator, models, 3)
        return await JournaledSampler(router, restarted(), "e").generate(replace(asked, request_id="second life"))

    saved = with_generator(server, interrupt, until_the_checkpoint)
    (part,) = [event.value for event in restarted().events("e")]
    whole = with_generator(server, interrupt, after_the_restart)
    assert len(part.token_ids) >= 60 and is_prefix(part, whole) and len(whole.token_ids) == LENGTH
    assert set(whole.versions[len(part.token_ids) :].tolist()) == {3}
    mine = whole.versions == 3
    expected = models.logprobs(3, prompt, whole.token_ids, forbidden=(END,))
    np.testing.assert_allclose(whole.logprobs[mine], expected[mine], atol=TOLERANCE)


def test_what_was_told_once_is_never_lost_while_requests_end(server: SGLangServer, models: Models) -> None:
    """Requests of many lengths end while it is asked again and again: each has at least what it had before, or is
    finished; none is both."""
    requests = [request(f"e{i}", prompt_of(i, 6), max_new_tokens=40 + 23 * i) for i in range(30)]
    finished: dict[str, Completion] = {}

    async def ask_until_all_are_done(generator: SGLangGenerator) -> int:
        async def drain() -> None:
            while len(finished) < len(requests):
                for name, outcome in await generator.drain():
                    assert isinstance(outcome, Completion) and name not in finished
                    finished[name] = outcome

        await update(generator, models, 1)
        generator.submit(requests)
        begin, known, num_asked = time.monotonic(), dict[str, Completion](), 0
        draining = asyncio.create_task(drain())
        while not draining.done():
            old = time.monotonic() - begin > 1.5  # before that a request may still be on its way to the server
            told = await generator.partial()
            for name, part in known.items():
                now = finished.get(name) or told.get(name)
                assert now is not None or not old, f"{name} had {len(part.token_ids)} tokens and is lost"
                if now is not None:
                    assert is_prefix(part, now) or np.array_equal(part.token_ids, now.token_ids)
            known |= told
            num_asked += 1
            await asyncio.sleep(0.01)
        await draining
        return num_asked

    assert with_generator(server, "retract", ask_until_all_are_done) > 20
    assert len(finished) == len(requests)
