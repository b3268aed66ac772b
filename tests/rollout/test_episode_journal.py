"""What a prompt has sampled so far outlives the process that sampled it, token by token."""

import asyncio
import json
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from helpers.both_sides import BothSides, in_flight
from helpers.simulated_sampling import make_dataset
from helpers.virtual_clock import settle
from rollout.experience import Event, MemoryExperience, Schedule, StalenessAdmission, Tags
from rollout.inference.mock import MockGenerator
from rollout.inference.router import Router
from rollout.journal import JournaledSampler, call_id, recorded
from rollout.types import Completion, GenerateRequest, Generator, Prompt, Sampler, SamplingParams, Trajectory
from rollout.workflows import TrajectoryBuilder

SAMPLING = SamplingParams(max_new_tokens=60, min_new_tokens=60)
GROUP_SAMPLING = SamplingParams(max_new_tokens=60, min_new_tokens=20)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    return str(tmp_path)


ID = "train/q0/0"


def store() -> MemoryExperience:
    """A store with one episode in flight."""
    made = MemoryExperience()
    tags = Tags(id=ID, group_id=ID, task="math", row="q0", epoch=0, version=0)
    assert made.open(tags, StalenessAdmission(Schedule(num_prompts=1, batch_size=1), 0)) == "open"
    return made


def restarted(experience: MemoryExperience) -> MemoryExperience:
    """A store that continues from a checkpoint of this one."""
    made = MemoryExperience()
    made.load_state_dict(pickle.loads(pickle.dumps(experience.state_dict())))
    return made


def lens(experience: MemoryExperience) -> list[int]:
    return [len(event.value.token_ids) for event in experience.events(ID)]


def request(
    name: str, seed: int = 1, output: Completion | None = None, sampling: SamplingParams = SAMPLING
) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_ids=[1, 2], sampling=sampling, seed=seed, output=output)


class Counting:
    """Passes requests on and notes what they came with."""

    def __init__(self, inner: Generator | Router, generators: Sequence[Generator] = ()) -> None:
        self.inner, self.generators = inner, generators
        self.given: list[int] = []
        self.given_tokens: dict[int, list[int]] = {}  # by seed

    async def generate(self, asked: GenerateRequest) -> Completion:
        tokens = [] if asked.output is None else asked.output.token_ids.tolist()
        self.given.append(len(tokens))
        self.given_tokens[asked.seed] = tokens
        return await self.inner.generate(asked)

    async def resume(self, version: int) -> None:
        for generator in self.generators:
            await generator.resume(version)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def same(one: Completion, other: Completion) -> bool:
    arrays = ("token_ids", "logprobs", "versions", "routed_experts")
    return one.finish_reason == other.finish_reason and all(
        np.array_equal(getattr(one, a), getattr(other, a)) for a in arrays
    )


async def test_what_was_known_takes_no_place_and_what_was_not_one_until_it_is_answered(model: str) -> None:
    generator, experience = MockGenerator(model, seconds_per_token=0.001), store()
    await JournaledSampler(generator, experience, ID).generate(request("a"))
    changes: list[int] = []
    journal = JournaledSampler(generator, restarted(experience), ID, num_expected=2, on_change=changes.append)
    assert journal.load == 2
    await journal.generate(request("a"))
    assert changes == [-1]
    await asyncio.gather(*(journal.generate(request(name, seed)) for seed, name in ((2, "b"), (3, "c"))))
    assert changes == [-1, 1, -1, -1] and journal.load == 0


async def test_finished_requests_are_answered_and_running_ones_go_on(model: str) -> None:
    router, experience = Router([MockGenerator(model, seconds_per_token=0.001)]), store()
    journal = JournaledSampler(router, experience, ID)
    done = await journal.generate(request("done", seed=1))
    running = asyncio.create_task(journal.generate(request("running", seed=2)))
    while not any(len(some.token_ids) for some in (await router.partial()).values()):
        await asyncio.sleep(0)
    journal.record_partial(await router.partial())
    running.cancel()
    finished, some = lens(experience)
    assert finished == 60 > some > 0

    counting, experience = Counting(MockGenerator(model)), restarted(experience)
    again = JournaledSampler(counting, experience, ID)
    assert same(await again.generate(request("other name", seed=1)), done) and counting.given == []
    assert lens(experience) == [finished, some], "a checkpoint right after the restart has what this one had"
    whole = await again.generate(request("running again", seed=2))
    assert counting.given == [some]
    assert np.array_equal(whole.token_ids, (await MockGenerator(model).generate(request("x", seed=2))).token_ids)
    await again.generate(request("once more", seed=2))
    assert counting.given[-1] == 0, "what one event holds is used once"


async def test_another_question_at_the_place_of_a_recorded_one_is_answered_anew(model: str) -> None:
    """As by a tool that gave another result this time: the tokens of before do not continue this prompt."""
    experience = store()
    await JournaledSampler(MockGenerator(model), experience, ID).generate(request("a"))
    counting = Counting(MockGenerator(model))
    again = JournaledSampler(counting, restarted(experience), ID)
    other = GenerateRequest(request_id="b", prompt_ids=[1, 3], sampling=SAMPLING, seed=1)
    await again.generate(other)
    assert counting.given == [0]


async def test_a_tool_is_called_once_in_an_episode_over_restarts_and_again_for_another_question(model: str) -> None:
    calls: list[str] = []

    async def search(word: str) -> dict[str, object]:
        calls.append(word)
        return {"found": word.upper(), "scores": np.arange(2.0), "number": len(calls)}

    async def use(experience: MemoryExperience, *words: str) -> list[object]:
        JournaledSampler(MockGenerator(model), experience, ID).enter()
        return [(await recorded("search", lambda w=word: search(w), asked=word))["number"] for word in words]

    experience = store()
    assert await use(experience, "a", "b") == [1, 2]
    assert await use(restarted(experience), "a", "b", "c") == [1, 2, 3]
    assert await use(restarted(experience), "a", "x") == [1, 4]
    assert calls == ["a", "b", "c", "x"]


async def test_a_call_that_is_made_again_after_a_restart_has_the_same_id(model: str) -> None:
    ids: list[str] = []

    async def act() -> int:
        ids.append(call_id())
        if len(ids) == 2:
            raise ConnectionError("the process is killed")
        return len(ids)

    async def use(experience: MemoryExperience) -> None:
        JournaledSampler(MockGenerator(model), experience, ID).enter()
        for _ in range(2):
            await recorded("act", act)
            assert call_id() != call_id(), "behind a recorded call"

    experience = store()
    with pytest.raises(ConnectionError):
        await use(experience)
    await use(restarted(experience))
    assert [id.rpartition(",")[0] for id in ids] == [
        f"{ID}: call act, turn 0", f"{ID}: call act, turn 1", f"{ID}: call act, turn 1",
    ]  # fmt: skip
    assert ids[1] == ids[2] and call_id() != call_id()


async def test_a_call_that_asks_for_something_else_has_another_id(model: str) -> None:
    async def use(word: str) -> str:
        async def act() -> str:
            return call_id()

        JournaledSampler(MockGenerator(model), store(), ID).enter()
        return await recorded("act", act, asked=word)

    assert await use("a") == await use("a") != await use("b")


@pytest.mark.virtual_clock
async def test_what_a_failed_attempt_leaves_behind_is_not_recorded_for_the_next_one(model: str) -> None:
    experience = store()
    failed = JournaledSampler(MockGenerator(model, seconds_per_token=1.0), experience, ID)
    left = asyncio.create_task(failed.generate(request("a")))
    await settle()
    failed.end()
    experience.reopen(ID, 1)
    await left
    experience.journal("train/other/0", Event(key="k", asked="", value=1))
    assert experience.events(ID) == []


class GroupOfThree:
    """Three requests a prompt: at once, as samples of a group are, or one after the other, as turns are."""

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once

    async def run(self, prompt: Prompt, generator: Sampler) -> list[Trajectory]:
        seeds = [100 * prompt.index + i for i in range(3)]
        requests = [request(f"{prompt.index}/{seed}", seed, sampling=GROUP_SAMPLING) for seed in seeds]
        if self._at_once:
            parts = await asyncio.gather(*(generator.generate(r) for r in requests))
        else:
            parts = [await generator.generate(r) for r in requests]
        return [TrajectoryBuilder(prompt, number=i).sampled(part).build(1.0) for i, part in enumerate(parts)]


async def consumed(producer: BothSides, generator: Counting, steps: Sequence[int]) -> list:
    rows = []
    for step in steps:
        for group in await producer.take(step):
            rows.append([(t.query_id, t.token_ids.tolist()) for t in group])
        await generator.resume(step + 1)
        producer.set_version(step + 1)
    return rows


def make_producer(model: str, *, at_once: bool, num_generators: int = 1, **settings: int) -> tuple[BothSides, Counting]:
    mocks = [MockGenerator(model, seconds_per_token=1.0) for _ in range(num_generators)]
    counting = Counting(Router(mocks), mocks)
    settings = {"batch_size": 2, "max_staleness": 2, **settings}
    return BothSides(make_dataset(12), GroupOfThree(at_once=at_once), counting, in_order=True, **settings), counting


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "in turn"])
@pytest.mark.parametrize("generators", [1, 2])
@pytest.mark.virtual_clock
async def test_a_run_cut_anywhere_trains_on_the_same_tokens_as_an_undisturbed_one(model, generators, at_once) -> None:
    producer, counting = make_producer(model, at_once=at_once)
    async with producer:
        undisturbed = await consumed(producer, counting, range(6))
    producer, counting = make_producer(model, at_once=at_once)
    async with producer:
        before = await consumed(producer, counting, range(2))
        await asyncio.sleep(40.5)
        state = pickle.loads(pickle.dumps(await producer.save()))
    assert any(in_flight(state).values()), "something had tokens"
    producer, counting = make_producer(model, at_once=at_once, num_generators=generators)
    producer.restore(state)
    await counting.resume(2)
    async with producer:
        after = await consumed(producer, counting, range(2, 6))
        assert producer.stats()["rollout/num_failures"] == 0, "a second attempt would hide what was lost"
    assert before + after == undisturbed
    assert max(counting.given) > 0, "prompts under way went on with their tokens"


@pytest.mark.virtual_clock
async def test_a_checkpoint_soon_after_a_restart_has_the_tokens_of_what_has_not_begun_again(model: str) -> None:
    def tokens(state: dict) -> dict[str, dict[str, list[int]]]:
        return {p: {e["key"]: e["value"]["token_ids"].tolist() for e in found} for p, found in in_flight(state).items()}

    producer, _ = make_producer(model, at_once=True)
    async with producer:
        await asyncio.sleep(10.5)
        state = await producer.save()
    assert len(in_flight(state)) == 6 and all(len(found) == 3 for found in in_flight(state).values())
    producer, _ = make_producer(model, at_once=True, max_in_flight=1)
    producer.restore(state)
    async with producer:
        await settle()
        assert producer.stats()["rollout/num_in_flight"] == 1
        assert tokens(await producer.save()) == tokens(state)


async def test_turns_of_one_seed_are_told_apart_by_their_order_although_they_ask_for_the_same(model: str) -> None:
    experience = store()
    first = JournaledSampler(MockGenerator(model), experience, ID)
    turns = [await first.generate(request("a", sampling=sampling)) for sampling in (GROUP_SAMPLING, SAMPLING)]
    assert len(turns[0].token_ids) != len(turns[1].token_ids)
    counting = Counting(MockGenerator(model))
    again = JournaledSampler(counting, restarted(experience), ID)
    assert all([same(await again.generate(request("b", sampling=s)), turn)
                for s, turn in zip((GROUP_SAMPLING, SAMPLING), turns, strict=True)])  # fmt: skip
    assert not counting.given
