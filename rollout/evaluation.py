"""Samples and judges answers with the workflow of a run: run_episodes() for all, answer_questions() for benchmarks.

Invariant: within its set an answer is named by (query_id, mode, number) and its seed is a function of that name, so a
continued evaluation samples exactly what is missing.
"""

import asyncio
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Self, TextIO, TypeVar

import numpy as np

from rollout.rewards.math import WRONG, extracted_answer
from rollout.rewards.pool import Outcome, RewardPool
from rollout.time_limit import not_counted, within
from rollout.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Prompt,
    Sampler,
    SamplingParams,
    Tokenizer,
    Workflow,
    lowest_right,
)
from rollout.workflow_calls import GroupLimits, check_group, outcome_of

Mode = Literal["greedy", "sample"]
Name = tuple[str, Mode, int]
"""(query_id, mode, number) of an answer."""


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
    score: float | None
    """1: right, 0: wrong; None: the evaluation has no reward from which an answer is right (`right_at`)."""
    tokens: int
    """Sampled ones."""
    finish_reason: FinishReason
    reward: float | None = None
    """What the workflow returned. None: of an evaluation that has not written it."""
    unjudged: str | None = None
    """Why it counts as wrong without a verdict: judging it ended in a timeout, crash, error or lack of memory."""

    @property
    def name(self) -> Name:
        return self.query_id, self.mode, self.number


class AnswerFile:
    """The answers so far, and where further ones go; no file before the first one. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Reads what is there; a last line that was cut off is dropped. Raises ValueError for any other bad line."""
        self._path = path
        self._file: TextIO | None = None
        self.answers: dict[Name, Answer] = {}
        for answer in read_answers(path, repair=True) if path.exists() else ():
            self.answers[answer.name] = answer

    def __enter__(self) -> Self:
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


logger = logging.getLogger(__name__)

_MAX_LOGGED_ERRORS = 3
_ANY_VERSION = 2**31 - 1


Key = TypeVar("Key")
"""How a caller of run_episodes() names an episode."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What a workflow made of one prompt: one sample of it."""

    text: str
    """From the first sampled token on; of several trajectories the last."""
    score: float
    """Mean reward of the trajectories."""
    tokens: int
    """Sampled ones, of all trajectories."""
    finish_reason: FinishReason
    outcomes: Sequence[Outcome] = ()
    """How judging ended, each time; empty if the workflow judges without the reward pool."""

    def is_right(self, right_at: float) -> bool:
        """Return whether it counts as right: its score is at least `right_at`."""
        return self.score >= lowest_right(right_at)


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
    right_at: float | None = None
    """The reward from which an answer is right. None: not known, so none is called right."""

    def names(self, prompt: Prompt) -> Iterator[Name]:
        yield prompt.query_id, "greedy", 0
        for number in range(self.num_samples):
            yield prompt.query_id, "sample", number

    @property
    def greedy(self) -> SamplingParams:
        return replace(self.sampling, temperature=0.0, top_p=1.0, top_k=-1)

    def check_room(self, set_name: str, prompt: Prompt) -> None:
        """Raise ValueError for a prompt that leaves no room for an answer."""
        if self.context_tokens <= len(prompt.token_ids):
            raise ValueError(
                f"{set_name}/{prompt.query_id}: its prompt has {len(prompt.token_ids)} tokens and the model's context "
                f"{self.context_tokens}; no completion fits: remove the question, or use a model with a longer context"
            )


@dataclass(frozen=True, kw_only=True)
class QuestionSet:
    """One benchmark among those that are answered together."""

    name: str
    prompts: Sequence[Prompt]
    done: Collection[Name]
    """Answers that are there already."""


class EvaluationSampler:
    """The generators as a workflow of an evaluation sees them: under request ids that no other one has, and without
    completions beyond the context."""

    def __init__(self, generator: Sampler, name: str, *, context_tokens: int) -> None:
        self._generator, self._name, self._context_tokens = generator, name, context_tokens

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample at most what the context has room for; nothing where a later turn has filled it."""
        room = self._context_tokens - len(request.prompt_ids)
        if room < 1:
            return Completion(
                token_ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), versions=np.empty(0, np.int32),
                finish_reason="length",
            )  # fmt: skip
        request = replace(request, sampling=request.sampling.at_most(room))
        with not_counted():
            return await self._generator.generate(request.named(self._name))


_outcomes: ContextVar[list[Outcome]] = ContextVar("outcomes")
"""Of the episode of this task."""


class RecordedRewards:
    """A reward pool that remembers how judging ended in each episode. Give it to the workflow of an evaluation."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool

    async def score(self, prompt: Prompt, text: str) -> float:
        return (await self.score_many(prompt, [text]))[0]

    async def score_many(self, prompt: Prompt, texts: Sequence[str]) -> list[float]:
        return [score for score, _ in await self.judge_many(prompt, texts)]

    async def judge_many(self, prompt: Prompt, texts: Sequence[str]) -> list[tuple[float, Outcome]]:
        judged = await self._pool.judge_many(prompt, texts)
        _outcomes.get([]).extend(outcome for _, outcome in judged)
        return judged


async def run_episodes(
    questions: Iterable[tuple[Key, Prompt, Workflow, Sampler]],
    tokenizer: Tokenizer,
    *,
    max_in_flight: int,
    timeout_seconds: float | None,
    fatal: tuple[type[Exception], ...],
    on_done: Callable[[Key, Prompt, Episode], None],
) -> None:
    """Run a workflow, made with groups of one sample and RecordedRewards, on each prompt; call `on_done` as each has
    ended.

    At most `max_in_flight` episodes run at once; they start in the order given. The first error of the types `fatal`
    ends the evaluation; an episode with another one, with malformed trajectories, or that takes `timeout_seconds`
    beside generation and scoring, counts as wrong."""
    remaining = iter(questions)
    num_failed = 0

    async def work() -> None:
        for key, prompt, workflow, generator in remaining:  # shared by all workers: each takes the next one
            outcomes: list[Outcome] = []
            _outcomes.set(outcomes)
            sample = partial(_episode, workflow, prompt, generator, outcomes, tokenizer, timeout_seconds)
            outcome = await outcome_of(sample, fatal=fatal)
            if isinstance(outcome, fatal):
                raise outcome
            if isinstance(outcome, Exception):
                nonlocal num_failed
                num_failed += 1
                if num_failed <= _MAX_LOGGED_ERRORS:
                    logger.warning("%s counts as wrong: its workflow raised", prompt.query_id, exc_info=outcome)
                outcome = Episode(text="", score=WRONG, tokens=0, finish_reason="stop", outcomes=(Outcome.ERROR,))
            on_done(key, prompt, outcome)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(max_in_flight):
                workers.create_task(work())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _episode(
    workflow: Workflow,
    prompt: Prompt,
    generator: Sampler,
    outcomes: Sequence[Outcome],
    tokenizer: Tokenizer,
    timeout_seconds: float | None,
) -> Episode:
    """Run the workflow. `outcomes`: the list that RecordedRewards fills in meanwhile."""
    answer = await within(timeout_seconds, partial(workflow.run, prompt, generator))
    trajectories = check_group(answer, prompt, version=_ANY_VERSION, limits=GroupLimits())
    last = trajectories[-1]
    sampled = np.flatnonzero(last.loss_mask)
    first = sampled[0] if len(sampled) else len(last.token_ids)
    return Episode(
        text=str(tokenizer.decode(last.token_ids[first:], skip_special_tokens=True)),
        score=float(np.mean([t.reward for t in trajectories])),
        tokens=sum(int(t.loss_mask.sum()) for t in trajectories),
        finish_reason=last.finish_reason,
        outcomes=tuple(outcomes),
    )


async def answer_questions(
    sets: Sequence[QuestionSet],
    generator: Sampler,
    tokenizer: Tokenizer,
    *,
    plan: EvaluationPlan,
    workflows: Mapping[Mode, Workflow],
    max_in_flight: int,
    timeout_seconds: float | None = None,
    fatal: tuple[type[Exception], ...],
    on_answer: Callable[[str, Answer], None],
) -> None:
    """Sample and judge every answer of `plan` that a set lacks; on_answer(name of the set, answer) is called as each is
    known. `workflows` sample as plan.greedy and plan.sampling have it.

    All sets share one pool of at most `max_in_flight` episodes, which takes them in the order given: the next set
    begins while the last answers of one are under way. `fatal`: see run_episodes().
    """
    missing = (
        (
            (of.name, mode, number),
            replace(prompt, epoch=number),  # another number is another seed
            workflows[mode],
            EvaluationSampler(generator, f"{of.name}/{mode}", context_tokens=plan.context_tokens),
        )
        for of in sets
        for prompt in of.prompts
        for _, mode, number in (name for name in plan.names(prompt) if name not in of.done)
    )

    def keep(key: tuple[str, Mode, int], prompt: Prompt, episode: Episode) -> None:
        set_name, mode, number = key
        failed = next((outcome for outcome in episode.outcomes if not outcome.is_verdict), None)
        on_answer(
            set_name,
            Answer(
                query_id=prompt.query_id, mode=mode, number=number, prompt=prompt.text, completion=episode.text,
                answer=extracted_answer(episode.text), reward=episode.score,
                score=None if plan.right_at is None else float(episode.is_right(plan.right_at)),
                tokens=episode.tokens, finish_reason=episode.finish_reason,
                unjudged=None if failed is None else failed.name.lower(),
            ),
        )  # fmt: skip

    await run_episodes(
        missing, tokenizer, max_in_flight=max_in_flight, timeout_seconds=timeout_seconds, fatal=fatal,
        on_done=keep,
    )  # fmt: skip
