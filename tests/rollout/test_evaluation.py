"""answer_questions(): several sets in one pool of requests."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout.evaluation import (
    Answer,
    AnswerFile,
    EvaluationPlan,
    EvaluationSampler,
    Mode,
    Name,
    QuestionSet,
    RecordedRewards,
    answer_questions,
    read_answers,
)
from rollout.rewards.pool import RewardPool
from rollout.types import Completion, GenerateRequest, Generator, Prompt, SamplingParams, Trajectory, Workflow
from rollout.workflows import SingleTurnMathWorkflow
from tools.demo.data import make_tokenizer

PLAN = EvaluationPlan(
    num_samples=1, sampling=SamplingParams(max_new_tokens=4, temperature=1.0), context_tokens=64, seed=0, right_at=0.5
)


RUNNER = asyncio.Runner()
POOL = RewardPool("math", num_workers=1)


@pytest.fixture(scope="module", autouse=True)
def started() -> Iterator[None]:
    """One event loop and one pool of rewards for all tests: to start a pool takes longer than a test."""
    with RUNNER:
        RUNNER.run(POOL.__aenter__())
        yield
        RUNNER.run(POOL.__aexit__(None, None, None))


class Waiting:
    """A generator that answers nobody before `needed` requests are there at once."""

    def __init__(self, needed: int, token_ids: Sequence[int] = (2,)) -> None:
        self.requests: list[GenerateRequest] = []
        self._needed, self._enough, self._token_ids = needed, asyncio.Event(), token_ids

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        if len(self.requests) == self._needed:
            self._enough.set()
        await self._enough.wait()
        return Completion(
            token_ids=np.asarray(self._token_ids, np.int32), logprobs=np.zeros(len(self._token_ids), np.float32),
            versions=np.zeros(len(self._token_ids), np.int32), finish_reason="stop",
        )  # fmt: skip


def questions(name: str, count: int, *, done: tuple[Name, ...] = ()) -> QuestionSet:
    prompts = [
        Prompt(
            query_id=str(i), index=i, task="math", text=f"{name}{i}", token_ids=np.asarray([3], np.int32),
            solutions=("0",),
        )
        for i in range(count)
    ]  # fmt: skip
    return QuestionSet(name=name, prompts=prompts, done=done)


async def answers_of(
    sets: list[QuestionSet],
    generator: Waiting,
    *,
    max_in_flight: int = 100,
    workflow: Callable[..., Workflow] = SingleTurnMathWorkflow,
) -> dict[str, list[Answer]]:
    found: dict[str, list[Answer]] = defaultdict(list)
    rewards, tokenizer = RecordedRewards(POOL), make_tokenizer()
    workflows: dict[Mode, Workflow] = {
        mode: workflow(
            tokenizer=tokenizer, reward_pool=rewards, sampling=sampling, group_size=1, seed=PLAN.seed
        )
        for mode, sampling in (("greedy", PLAN.greedy), ("sample", PLAN.sampling))
    }  # fmt: skip
    await asyncio.wait_for(
        answer_questions(
            sets, generator, tokenizer, plan=PLAN, workflows=workflows, max_in_flight=max_in_flight,  # type: ignore[arg-type]
            fatal=(ConnectionError,),
            on_answer=lambda name, answer: found[name].append(answer),
        ),
        timeout=120,
    )  # fmt: skip
    return found


def test_all_sets_are_under_way_at_once_and_questions_of_one_id_are_told_apart() -> None:
    async def run() -> None:
        generator = Waiting(needed=2 * (3 + 1))
        found = await answers_of([questions("a", 3), questions("b", 1)], generator)
        assert len({request.request_id for request in generator.requests}) == 8
        assert len({request.seed for request in generator.requests}) < 8, "a seed is a function of the name alone"
        assert {name: len(answers) for name, answers in found.items()} == {"a": 6, "b": 2}
        assert all(answer.prompt == f"{name}{answer.query_id}" for name, of in found.items() for answer in of)

    RUNNER.run(run())


def test_what_a_set_has_is_not_asked_again_and_sets_come_in_the_order_given() -> None:
    async def run() -> None:
        generator = Waiting(needed=1)
        there: tuple[Name, ...] = (("0", "greedy", 0), ("1", "sample", 0))
        await answers_of([questions("b", 1), questions("a", 2, done=there)], generator, max_in_flight=1)
        asked = [request.request_id.split("/")[:3] for request in generator.requests]
        assert asked == [["b", "greedy", "0"], ["b", "sample", "0"], ["a", "sample", "0"], ["a", "greedy", "1"]]

    RUNNER.run(run())


def test_the_greedy_request_takes_the_likeliest_token_and_the_sampled_one_keeps_its_settings() -> None:
    sampling = SamplingParams(max_new_tokens=4, temperature=0.7, top_p=0.9, top_k=20, stop_token_ids=(5,))
    assert replace(PLAN, sampling=sampling).greedy == replace(sampling, temperature=0.0, top_p=1.0, top_k=-1)


def test_every_sample_of_a_question_has_a_seed_of_its_own_which_does_not_change(monkeypatch) -> None:
    monkeypatch.setattr("test_evaluation.PLAN", replace(PLAN, num_samples=3))

    async def seeds(done: tuple[Name, ...]) -> dict[tuple[str, ...], int]:
        generator = Waiting(needed=1)
        await answers_of([questions("a", 1, done=done)], generator)
        return {(r.request_id.split("/")[1], str(r.request_id.split("/")[3])): r.seed for r in generator.requests}

    everything = RUNNER.run(seeds(()))
    assert len({seed for (mode, _), seed in everything.items() if mode == "sample"}) == 3
    missing = RUNNER.run(seeds((("0", "greedy", 0), ("0", "sample", 0), ("0", "sample", 1))))
    assert missing == {("sample", "2"): everything["sample", "2"]}


class TwoTurns(SingleTurnMathWorkflow):
    """Samples twice with a token of its own between; the reward is a half."""

    async def run(self, prompt: Prompt, generator: Generator) -> list[Trajectory]:
        first, second = [await generator.generate(request) for request in self._requests(prompt) for _ in range(2)]
        ids = [*prompt.token_ids, *first.token_ids, 7, *second.token_ids]
        mask = np.array([False] * len(prompt.token_ids) + [True, False, True])
        await self._reward_pool.score_many(prompt, ["\\boxed{0}"])
        return [
            Trajectory(
                query_id=prompt.query_id, token_ids=np.array(ids, np.int32), loss_mask=mask,
                rollout_logprobs=np.zeros(4, np.float32), versions=np.zeros(4, np.int32), reward=0.5,
                finish_reason="stop",
            )
        ]  # fmt: skip


def test_a_question_is_answered_and_judged_by_the_workflow() -> None:
    found = RUNNER.run(answers_of([questions("a", 1)], Waiting(needed=1), workflow=TwoTurns))
    decoded = make_tokenizer().decode([2, 7, 2], skip_special_tokens=True)
    assert [(a.completion, a.tokens, a.reward, a.score, a.unjudged) for a in found["a"]] == [
        (decoded, 2, 0.5, 1.0, None)
    ] * 2


def test_an_answer_is_judged_and_written_without_the_special_tokens_that_end_it() -> None:
    tokenizer = make_tokenizer()
    zero = tokenizer.convert_tokens_to_ids("0")
    ended = [zero, tokenizer.eos_token_id, tokenizer.pad_token_id]
    found = RUNNER.run(answers_of([questions("a", 1)], Waiting(needed=1, token_ids=ended)))
    assert [(a.completion, a.answer, a.score, a.tokens) for a in found["a"]] == [("0", "0", 1.0, 3)] * 2


class Failing(SingleTurnMathWorkflow):
    """Raises on the first prompt, returns nothing on the second, loses the generator on the fourth."""

    async def run(self, prompt: Prompt, generator: Generator) -> list[Trajectory]:
        if prompt.index in (0, 3):
            raise ZeroDivisionError if prompt.index == 0 else ConnectionError
        return [] if prompt.index == 1 else await super().run(prompt, generator)


def test_an_episode_that_fails_counts_as_wrong_and_a_lost_generator_ends_the_evaluation(caplog) -> None:
    found = RUNNER.run(answers_of([questions("a", 3)], Waiting(needed=1), workflow=Failing))
    assert [a.unjudged for a in found["a"] if a.mode == "greedy"] == ["error", "error", None]
    assert all(a.score == 0 for a in found["a"] if a.query_id in "01")
    assert "0 counts as wrong: its workflow raised" in caplog.text and "ZeroDivisionError" in caplog.text
    with pytest.raises(ConnectionError):
        RUNNER.run(answers_of([questions("a", 4)], Waiting(needed=1), workflow=Failing))


def test_an_answer_is_no_longer_than_the_context_has_room_for() -> None:
    (prompt,) = questions("a", 1).prompts
    limits = []

    class Limits:
        async def generate(self, request: GenerateRequest) -> Completion:
            limits.append(request.sampling.max_new_tokens)
            return Completion(token_ids=np.empty(0), logprobs=np.empty(0), versions=np.empty(0), finish_reason="stop")

    async def ask(length: int) -> Completion:
        request = GenerateRequest(request_id="0", prompt_ids=[3] * length, sampling=PLAN.sampling)
        return await EvaluationSampler(Limits(), "a", context_tokens=64).generate(request)  # type: ignore[arg-type]

    for length in (59, 60, 61, 63):
        RUNNER.run(ask(length))
    assert limits == [4, 4, 3, 1]
    full = RUNNER.run(ask(64))
    assert (len(full.token_ids), full.finish_reason) == (0, "length") and len(limits) == 4
    with pytest.raises(ValueError, match=r"a/0: its prompt has 64 tokens .* no completion fits"):
        PLAN.check_room("a", replace(prompt, token_ids=np.full(64, 3, np.int32)))


def test_an_answer_is_in_the_file_before_the_next_one_is_known(tmp_path: Path) -> None:
    answer = Answer(
        query_id="1", mode="greedy", number=0, prompt="p", completion="c", answer="c", score=1.0, tokens=1,
        finish_reason="stop",
    )  # fmt: skip
    with AnswerFile(tmp_path / "set" / "answers.jsonl") as file:
        file.add(answer)
        assert read_answers(tmp_path / "set" / "answers.jsonl") == [answer]  # as after a kill
