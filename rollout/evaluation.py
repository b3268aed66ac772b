"""Samples and judges answers: sample_and_judge() for every evaluation, answer_questions() for benchmarks.

One line of a benchmark's file is one answer, written when it is judged, so that whatever ends an evaluation costs the
answers under way and nothing else. Invariant: within its set an answer is named by (query_id, mode, number) and its
seed is a function of that name, so a continued evaluation samples exactly what is missing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

from rollout.data.prompts import Tokenizer
from rollout.rewards.math_answers import extracted_answer
from rollout.rewards.pool import Outcome, RewardPool
from rollout.types import Completion, FinishReason, GenerateRequest, Generator, Prompt, SamplingParams
from rollout.workflows import sample_seed

logger = logging.getLogger(__name__)

Mode = Literal["greedy", "sample"]
Name = tuple[str, Mode, int]
"""(query_id, mode, number) of an answer."""


Key = TypeVar("Key")
"""How a caller of sample_and_judge() names a request."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One completion with its text and score."""

    completion: Completion
    text: str
    score: float
    outcome: Outcome
    """How judging ended."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One completion, judged: a line of the file."""

    query_id: str
    mode: Mode
    number: int
    """0 for the greedy one, else 0 .. num_samples - 1."""
    prompt: str
    completion: str
    answer: str
    """The part of the completion that was judged."""
    score: float
    """1: equal to the solution; 0: not."""
    tokens: int
    """Of the completion."""
    finish_reason: FinishReason
    unjudged: str | None = None
    """Why it counts as wrong without a verdict: judging it ended in a timeout, crash, error or lack of memory."""

    @property
    def name(self) -> Name:
        return self.query_id, self.mode, self.number


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """Settings of every question."""

    num_samples: int
    """Sampled answers a question, besides the greedy one."""
    sampling: SamplingParams
    """Of the sampled ones; the greedy one differs in its temperature only."""
    context_tokens: int
    """Prompt and completion together have at most this many."""
    seed: int

    def names(self, prompt: Prompt) -> Iterator[Name]:
        yield prompt.query_id, "greedy", 0
        for number in range(self.num_samples):
            yield prompt.query_id, "sample", number

    def request(self, set_name: str, prompt: Prompt, mode: Mode, number: int) -> GenerateRequest:
        """Return the request for a prompt; `set_name` distinguishes questions with the same id in two sets. Raises
        ValueError for a prompt that leaves no room for an answer."""
        room = self.context_tokens - len(prompt.token_ids)
        if room < 1:
            raise ValueError(
                f"{set_name}/{prompt.query_id}: its prompt has {len(prompt.token_ids)} tokens and the model's context "
                f"{self.context_tokens}; no completion fits: remove the question, or use a model with a longer context"
            )
        sampling = replace(self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, room))
        if mode == "greedy":
            sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=-1)
        return GenerateRequest(
            request_id=f"{set_name}/{prompt.query_id}/{mode}/{number}",
            prompt_ids=prompt.token_ids.tolist(),
            sampling=sampling,
            seed=sample_seed(self.seed, 0, prompt.index, number),
            group_id=f"{set_name}/{prompt.query_id}",
        )


@dataclass(frozen=True, kw_only=True)
class QuestionSet:
    """One benchmark among those that are answered together."""

    name: str
    prompts: Sequence[Prompt]
    done: Collection[Name]
    """Answers that are there already."""


class AnswerFile:
    """The answers so far, and where further ones go; no file before the first one. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Reads what is there; a last line that was cut off is dropped. Raises ValueError for any other bad line."""
        self._path = path
        self._file: TextIO | None = None
        self.answers: dict[Name, Answer] = {}
        for answer in read_answers(path, repair=True) if path.exists() else ():
            self.answers[answer.name] = answer

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, answer: Answer) -> None:
        """Write it down; it survives the end of this process."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        self.answers[answer.name] = answer
        self._file.write(json.dumps(asdict(answer), ensure_ascii=False) + "\n")
        self._file.flush()


def read_answers(path: Path, *, repair: bool = False) -> list[Answer]:
    """Return the answers in a file. `repair` cuts off a last line without an end, which a kill may leave."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data) and repair:
        os.truncate(path, whole)
    answers = []
    for number, line in enumerate(data[:whole].splitlines(), start=1):
        try:
            answers.append(Answer(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path}:{number}: not an answer of an evaluation ({error}); move the file to start again"
            ) from error
    return answers


async def sample_and_judge(
    questions: Iterable[tuple[Key, Prompt, GenerateRequest]],
    generator: Generator,
    rewards: RewardPool,
    tokenizer: Tokenizer,
    *,
    max_in_flight: int,
    on_judged: Callable[[Key, Prompt, Judged], None],
) -> None:
    """Sample a completion for each request and judge its text; call `on_judged` as each is known.

    At most `max_in_flight` requests run at once; they start in the order given. The first request that fails ends the
    evaluation with its error."""
    remaining = iter(questions)

    async def work() -> None:
        for key, prompt, request in remaining:  # shared by all workers: each takes the next one
            completion = await generator.generate(request)
            text = str(tokenizer.decode(completion.token_ids, skip_special_tokens=True))
            ((score, outcome),) = await rewards.judge_many(prompt, [text])
            on_judged(key, prompt, Judged(completion=completion, text=text, score=score, outcome=outcome))

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(max_in_flight):
                workers.create_task(work())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def answer_questions(
    sets: Sequence[QuestionSet],
    generator: Generator,
    rewards: RewardPool,
    tokenizer: Tokenizer,
    *,
    plan: EvaluationPlan,
    max_in_flight: int,
    on_answer: Callable[[str, Answer], None],
) -> None:
    """Sample and judge every answer of `plan` that a set lacks; on_answer(name of the set, answer) is called as each is
    known.

    All sets share one pool of at most `max_in_flight` requests, which takes them in the order given: the next set
    begins while the last answers of one are under way. A request that fails ends the evaluation with its error.
    """
    missing = (
        ((of.name, mode, number), prompt, plan.request(of.name, prompt, mode, number))
        for of in sets
        for prompt in of.prompts
        for _, mode, number in (name for name in plan.names(prompt) if name not in of.done)
    )

    def keep(key: tuple[str, Mode, int], prompt: Prompt, judged: Judged) -> None:
        set_name, mode, number = key
        on_answer(
            set_name,
            Answer(
                query_id=prompt.query_id, mode=mode, number=number, prompt=prompt.text, completion=judged.text,
                answer=extracted_answer(judged.text), score=float(judged.score > 0),
                tokens=len(judged.completion.token_ids), finish_reason=judged.completion.finish_reason,
                unjudged=None if judged.outcome.is_verdict else judged.outcome.name.lower(),
            ),
        )  # fmt: skip

    await sample_and_judge(missing, generator, rewards, tokenizer, max_in_flight=max_in_flight, on_judged=keep)


def end_token_ids(tokenizer: Any, generation_config: dict[str, Any]) -> tuple[int, ...]:
    """Return the token ids that end an answer: the tokenizer's end and pad tokens, and the end tokens of
    generation_config.json (a chat model's turn has its own end token)."""
    ends = generation_config.get("eos_token_id") or []
    listed = ends if isinstance(ends, list) else [ends]
    return tuple(sorted({t for t in (tokenizer.eos_token_id, tokenizer.pad_token_id, *listed) if t is not None}))
