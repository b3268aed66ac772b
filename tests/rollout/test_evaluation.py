"""answer_questions(): several sets in one pool of requests."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import numpy as np

from rollout.evaluation import Answer, EvaluationPlan, Name, QuestionSet, answer_questions
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
