"""What a prompt has sampled so far outlives the process that sampled it, token by token."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulated_sampling import make_dataset

from rollout.ledger import PromptLedger, from_plain, to_plain
from rollout.mock import MockGenerator
from rollout.producer import RolloutProducer
from rollout.router import Router
from rollout.types import Completion, GenerateRequest, Generator, Prompt, SamplingParams, Trajectory
from rollout.workflow import build_trajectory

SAMPLING = SamplingParams(max_new_tokens=60, min_new_tokens=60)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    return str(tmp_path)


def request(name: str, seed: int = 1, output: Completion | None = None) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_ids=[1, 2], sampling=SAMPLING, seed=seed, output=output)


class Counting:
    """Passes requests on and notes what they came with."""

    def __init__(self, inner: Generator) -> None:
        self.inner = inner
        self.given: list[int] = []

    async def generate(self, asked: GenerateRequest) -> Completion:
        self.given.append(0 if asked.output is None else len(asked.output.token_ids))
        return await self.inner.generate(asked)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def same(one: Completion, other: Completion) -> bool:
    arrays = ("token_ids", "logprobs", "versions", "routed_experts")
    return one.finish_reason == other.finish_reason and all(
        np.array_equal(getattr(one, a), getattr(other, a)) for a in arrays
    )


def test_what_was_known_takes_no_place_and_what_was_not_one_until_it_is_answered(model: str) -> None:
    async def main() -> None:
        generator = MockGenerator(model, seconds_per_token=0.001)
        before = PromptLedger(generator)
        await before.generate(request("a"))
        changes: list[int] = []
        ledger = PromptLedger(generator, before.entries({}), num_expected=2, on_change=changes.append)
        assert ledger.load == 2
        await ledger.generate(request("a"))
        assert changes == [-1]
        await asyncio.gather(*(ledger.generate(request(name, seed)) for seed, name in ((2, "b"), (3, "c"))))
        assert changes == [-1, 1, -1, -1] and ledger.load == 0

    asyncio.run(main())


def test_a_token_of_the_mock_generator_is_a_function_of_seed_and_place_however_often_it_stops(model: str) -> None:
    async def main() -> None:
        at_once = await MockGenerator(model).generate(request("a"))
        slow = MockGenerator(model, seconds_per_token=0.001)
        sampling = asyncio.create_task(slow.generate(request("a")))
        await asyncio.sleep(0.02)
        await slow.pause()
        some = (await slow.partial())["a"]
        await asyncio.sleep(0.02)
        assert 0 < len(some.token_ids) == len((await slow.partial())["a"].token_ids) < 60
        await slow.resume(1)
        whole = await sampling
        assert np.array_equal(whole.token_ids, at_once.token_ids) and whole.versions[-1] == 1
        assert (whole.versions[: len(some.token_ids)] == 0).all()
        again = await slow.generate(request("a", output=some))
        assert np.array_equal(again.token_ids, at_once.token_ids)
        assert again.versions.tolist() == some.versions.tolist() + [1] * (60 - len(some.token_ids))

    asyncio.run(main())


def test_finished_requests_are_answered_and_running_ones_go_on(model: str) -> None:
    async def main() -> None:
        slow = MockGenerator(model, seconds_per_token=0.001)
        ledger = PromptLedger(Router([slow]))
        done = await ledger.generate(request("done", seed=1))
        running = asyncio.create_task(ledger.generate(request("running", seed=2)))
        await asyncio.sleep(0.03)
        entries = ledger.entries(await ledger.partial())
        running.cancel()
        assert [len(part.token_ids) == 60 for _, part in entries] == [True, False]
        entries = [from_plain(plain) for plain in pickle.loads(pickle.dumps([to_plain(e) for e in entries]))]

        counting = Counting(MockGenerator(model))
        again = PromptLedger(counting, entries)
        assert same(await again.generate(request("other name", seed=1)), done) and counting.given == []
        assert len(again.entries({})) == 2, "a checkpoint right after the restart has everything that this one had"
        whole = await again.generate(request("running again", seed=2))
        assert counting.given == [len(entries[1][1].token_ids)]
        assert np.array_equal(whole.token_ids, (await MockGenerator(model).generate(request("x", seed=2))).token_ids)
        await again.generate(request("once more", seed=2))
        assert counting.given[-1] == 0, "what one entry holds is used once"

    asyncio.run(main())


class GroupOfThree:
    """Three requests a prompt, one after the other: a workflow of several turns."""

    def __init__(self) -> None:
        self.restarts = 0

    async def run(self, prompt: Prompt, generator: Generator) -> list[Trajectory]:
        parts = [
            await generator.generate(replace(request(f"{prompt.index}/{i}"), seed=100 * prompt.index + i))
            for i in range(3)
        ]
        return [build_trajectory(prompt, part, 1.0) for part in parts]


async def consumed(producer: RolloutProducer, generator: Counting, steps: Sequence[int]) -> list:
    rows = []
    for step in steps:
        for group in await producer.take(step):
            rows.append([(t.query_id, t.token_ids.tolist()) for t in group])
        await generator.resume(step + 1)
        producer.set_version(step + 1)
    return rows


@pytest.mark.parametrize("generators", [1, 2])
def test_a_run_cut_anywhere_trains_on_the_same_tokens_as_an_undisturbed_one(model: str, generators: int) -> None:
    def make(num_generators: int) -> tuple[RolloutProducer, Counting]:
        mocks = [MockGenerator(model, seconds_per_token=0.0005) for _ in range(num_generators)]
        counting = Counting(Router(mocks))
        producer = RolloutProducer(
            make_dataset(12), GroupOfThree(), counting, batch_size=2, max_staleness=2, in_order=True
        )
        return producer, counting

    async def main() -> None:
        producer, counting = make(1)
        async with producer:
            undisturbed = await consumed(producer, counting, range(4))
        producer, counting = make(1)
        async with producer:
            before = await consumed(producer, counting, range(2))
            await asyncio.sleep(0.04)
            state = pickle.loads(pickle.dumps(await producer.state_dict()))
        assert any(state["in_flight"].values()), "something had tokens"
        producer, counting = make(generators)
        producer.load_state_dict(state)
        await counting.resume(2)
        async with producer:
            after = await consumed(producer, counting, range(2, 4))
        assert before + after == undisturbed
        assert max(counting.given) > 0, "prompts under way went on with their tokens"

    asyncio.run(main())
