"""answer_questions(): several sets in one pool of requests."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout.evaluation import (
    Answer,
    AnswerFile,
    EvaluationPlan,
    Name,
    QuestionSet,
    answer_questions,
    read_answers,
)
from rollout.rewards.pool import RewardPool
from rollout.types import Completion, GenerateRequest, Prompt, SamplingParams
from tools.demo.data import make_tokenizer

PLAN = EvaluationPlan(
    num_samples=1, sampling=SamplingParams(max_new_tokens=4, temperature=1.0), context_tokens=64, seed=0
)


class Waiting:
    """A generator that answers nobody before `needed` requests are there at once."""

    def __init__(self, needed: int) -> None:
        self.ids: list[str] = []
        self._needed, self._enough = needed, asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.ids.append(request.request_id)
        if len(self.ids) == self._needed:
            self._enough.set()
        await self._enough.wait()
        return Completion(
            token_ids=np.asarray([2], np.int32), logprobs=np.zeros(1, np.float32), versions=np.zeros(1, np.int32),
            finish_reason="stop",
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
    sets: list[QuestionSet], generator: Waiting, *, max_in_flight: int = 100
) -> dict[str, list[Answer]]:
    found: dict[str, list[Answer]] = defaultdict(list)
    async with RewardPool("math", num_workers=1) as rewards:
        await asyncio.wait_for(
            answer_questions(
                sets, generator, rewards, make_tokenizer(), plan=PLAN, max_in_flight=max_in_flight,  # type: ignore[arg-type]
                on_answer=lambda name, answer: found[name].append(answer),
            ),
            timeout=120,
        )  # fmt: skip
    return found


def test_all_sets_are_under_way_at_once_and_questions_of_one_id_are_told_apart() -> None:
    async def run() -> None:
        generator = Waiting(needed=2 * (3 + 1))
        found = await answers_of([questions("a", 3), questions("b", 1)], generator)
        assert len(set(generator.ids)) == 8
        assert {name: len(answers) for name, answers in found.items()} == {"a": 6, "b": 2}
        assert all(answer.prompt == f"{name}{answer.query_id}" for name, of in found.items() for answer in of)

    asyncio.run(run())


def test_what_a_set_has_is_not_asked_again_and_sets_come_in_the_order_given() -> None:
    async def run() -> None:
        generator = Waiting(needed=1)
        there: tuple[Name, ...] = (("0", "greedy", 0), ("1", "sample", 0))
        await answers_of([questions("b", 1), questions("a", 2, done=there)], generator, max_in_flight=1)
        assert generator.ids == ["b/0/greedy/0", "b/0/sample/0", "a/0/sample/0", "a/1/greedy/0"]

    asyncio.run(run())


def test_the_greedy_request_takes_the_likeliest_token_and_the_sampled_one_keeps_its_settings() -> None:
    sampling = SamplingParams(max_new_tokens=4, temperature=0.7, top_p=0.9, top_k=20, stop_token_ids=(5,))
    plan = replace(PLAN, sampling=sampling)
    (prompt,) = questions("a", 1).prompts
    assert plan.request("a", prompt, "sample", 0).sampling == sampling
    greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=-1)
    assert plan.request("a", prompt, "greedy", 0).sampling == greedy


def test_an_answer_is_no_longer_than_the_context_has_room_for() -> None:
    (prompt,) = questions("a", 1).prompts
    for length, room in ((59, 4), (60, 4), (61, 3), (63, 1)):
        long = replace(prompt, token_ids=np.full(length, 3, np.int32))
        assert PLAN.request("a", long, "sample", 0).sampling.max_new_tokens == room
    with pytest.raises(ValueError, match=r"a/0: its prompt has 64 tokens .* no completion fits"):
        PLAN.request("a", replace(prompt, token_ids=np.full(64, 3, np.int32)), "sample", 0)


def test_an_answer_is_in_the_file_before_the_next_one_is_known(tmp_path: Path) -> None:
    answer = Answer(
        query_id="1", mode="greedy", number=0, prompt="p", completion="c", answer="c", score=1.0, tokens=1,
        finish_reason="stop",
    )  # fmt: skip
    with AnswerFile(tmp_path / "set" / "answers.jsonl") as file:
        file.add(answer)
        assert read_answers(tmp_path / "set" / "answers.jsonl") == [answer]  # as after a kill
