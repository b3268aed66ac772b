"""One evaluation from its settings to its table: between the command line (__main__.py) and rollout/evaluation.py.

Invariant: what settles an answer (model, benchmark, sampling, template) is written beside the answers before the first
one, and an evaluation is continued only where it is the same.
"""

import hashlib
import logging
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from core.explore.workflow import workflow_choice
from rollout.data.encoder import Encoder
from rollout.data.prompts import first_prompt
from rollout.data.tokenizer import load_tokenizer
from rollout.errors import GeneratorCallError, GeneratorStartError
from rollout.evaluation import Answer, AnswerFile, EvaluationPlan, Mode, QuestionSet, RecordedRewards, answer_questions
from rollout.inference.embedded.generator import GeneratorError
from rollout.inference.router import NoGeneratorError, Router, StopTexts, requests_at_once
from rollout.rewards.pool import RewardPool, RewardWorkerError
from rollout.types import Prompt, SamplingParams, Workflow
from rollout.workflows import close_workflow, make_workflow
from tools.eval.data import EvalFailure, make_prompts
from tools.eval.folder import check_same, check_same_prompts, empty
from tools.eval.model import (
    CONVERTED,
    SETTINGS,
    hugging_face_folder,
    read_json,
    start_generators,
    weights_identity,
    write_json,
)
from tools.eval.report import summarise, unjudged_line, write_report
from tools.eval.settings import EvalSettings, Judging

logger = logging.getLogger(__name__)

ALL = "all sets"
"""What the line is called that counts everything."""
_LOG_EVERY_SECONDS = 10.0


class Meter:
    """Answers of each benchmark and of all together, and the tokens/s of the pool that all of them share, from the
    first request to the last answer. Use as a context manager around the sampling."""

    def __init__(self, sets: Mapping[str, tuple[int, int]]) -> None:
        """sets: (existing answers, requested answers) of each benchmark."""
        self._counts = {name: _Count(done, wanted) for name, (done, wanted) in sets.items()}
        self._all = _Count(sum(done for done, _ in sets.values()), sum(wanted for _, wanted in sets.values()))
        self._tokens = 0
        self._start = self._last = self._said = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bars = Progress(
            *columns, TextColumn("{task.fields[rate]}"), console=Console(stderr=True), disable=not sys.stderr.isatty()
        )
        self._bar_of = {
            name: self._bars.add_task(name, total=count.wanted, completed=count.done, rate="")
            for name, count in {**self._counts, ALL: self._all}.items()
        }

    def __enter__(self) -> Self:
        self._bars.__enter__()
        self._start = self._last = self._said = time.monotonic()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bars.stop()
        if self._all.new:
            logger.info("%s", self._line())

    def add(self, name: str, answer: Answer) -> None:
        """Count one more answer of the benchmark `name`."""
        self._last = time.monotonic()
        self._tokens += answer.tokens
        count = self._counts[name]
        for one in (count, self._all):
            one.add(answer)
        self._bars.advance(self._bar_of[name])
        self._bars.update(self._bar_of[ALL], advance=1, rate=self._rate())
        if not self._bars.disable:
            return
        if count.done + count.new == count.wanted:
            logger.info("%s: %s, %s", name, count.answers(), count.share())
        if self._last - self._said >= _LOG_EVERY_SECONDS:
            self._said = self._last
            logger.info("%s", self._line())

    def _rate(self) -> str:
        return f"{self._tokens / max(self._last - self._start, 1e-9):,.0f} tokens/s"

    def _line(self) -> str:
        return f"{ALL}: {self._all.answers()}, {self._rate()}, {self._all.share()}"


class _Count:
    def __init__(self, done: int, wanted: int) -> None:
        self.done, self.wanted = done, wanted
        self.new = self.judged = 0
        self.right = self.reward = 0.0

    def add(self, answer: Answer) -> None:
        self.new += 1
        self.reward += answer.reward or 0.0
        self.judged += answer.score is not None
        self.right += answer.score or 0.0

    def answers(self) -> str:
        return f"{self.done + self.new}/{self.wanted} answers"

    def share(self) -> str:
        right = f", {100 * self.right / self.new:.1f} % right" if self.judged else ""
        return f"of the new ones: mean reward {self.reward / self.new:.3f}{right}"


_ANSWERS_STAY_THE_SAME = {"mem_fraction_static", "max_total_tokens", "log_level", "watchdog_timeout"}
"""Server arguments of which an evaluation may be continued with others: what was too little the first time."""
FAILURES = (
    EvalFailure, GeneratorStartError, GeneratorCallError, NoGeneratorError, GeneratorError, RewardWorkerError,
    ConnectionError,
)  # fmt: skip
"""What ends an evaluation while it runs, each with a message for the user."""


async def evaluate(settings: EvalSettings) -> str:
    """Answer what is not yet answered, write the report, return the table."""
    output = settings.output_path
    output.mkdir(parents=True, exist_ok=True)
    given_model = {"model_path": str(settings.model_path), "weights": weights_identity(settings.model_path)}
    if settings.overwrite:  # the answers go only when everything they could be lost for is checked
        shutil.rmtree(output / CONVERTED, ignore_errors=True)
    else:
        check_same(output / SETTINGS, given_model)  # before the model of the answers gives way to another one
    model = hugging_face_folder(settings.model_path, output)
    tokenizer = load_tokenizer(model)
    encoder = Encoder(tokenizer, settings.judging.prompt_format, folder=model)
    config = read_json(model / "config.json")
    context = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    ends = encoder.end_token_ids
    prompts = {b.name: make_prompts(b, encoder)[: settings.num_questions] for b in settings.benchmarks}
    stop = StopTexts(tokenizer, settings.judging.stop)
    sampling = replace(settings.sampling, stop_token_ids=ends, pause_token_ids=stop.token_ids)
    logger.info("%s", first_prompt(next(of[0] for of in prompts.values()), settings.judging.reward))
    if context and sampling.max_new_tokens > context:
        logger.warning(
            "--max_gen_tokens %d: the model's context of %d ends an answer before", sampling.max_new_tokens, context
        )
    plan = EvaluationPlan(
        num_samples=settings.num_samples,
        sampling=sampling,
        context_tokens=context or 2**31,
        seed=settings.seed,
        right_at=settings.judging.right_at,
    )
    for name, of in prompts.items():
        for prompt in of:
            plan.check_room(name, prompt)
    identity = given_model | _identity(settings, encoder)
    if settings.overwrite:
        empty(output, keep=output / CONVERTED)
    before = check_same(output / SETTINGS, identity)
    for name, of in prompts.items():
        check_same_prompts(name, AnswerFile(output / f"{name}.jsonl").answers.values(), of)
    if before != identity:
        write_json(output / SETTINGS, identity)

    answers = await _answer_all(settings, prompts, model, encoder, plan, stop)
    reward = settings.judging.reward
    table = write_report(
        output, [summarise(name, of) for name, of in answers.items()], identity,
        reward=None if reward == Judging.reward else reward,
    )  # fmt: skip
    unjudged = unjudged_line(answer for of in answers.values() for answer in of)
    return table if unjudged is None else f"{table}\n{unjudged}"


async def _answer_all(
    settings: EvalSettings,
    prompts: dict[str, list[Prompt]],
    model: Path,
    encoder: Encoder,
    plan: EvaluationPlan,
    stop: StopTexts,
) -> dict[str, list[Answer]]:
    """Return all answers of every benchmark, old and new. Generators are started only where something is missing; what
    is missing of all benchmarks is one stream of requests, so that none of them waits for another's longest answer."""
    wanted = {name: {n for prompt in of for n in plan.names(prompt)} for name, of in prompts.items()}
    files = {name: AnswerFile(settings.output_path / f"{name}.jsonl") for name in prompts}
    missing = {name: len(wanted[name] - files[name].answers.keys()) for name in prompts}
    if any(missing.values()):
        async with AsyncExitStack() as stack:
            pool = RewardPool(settings.judging.reward, num_workers=settings.reward_workers)
            rewards = RecordedRewards(await stack.enter_async_context(pool))
            workflows = _workflows(settings, plan, encoder, rewards)
            for workflow in workflows.values():
                stack.push_async_callback(close_workflow, workflow)
            generators = await start_generators(stack, model, settings.generator, settings.output_path / "logs")
            router = Router(generators, stop=stop)
            stack.push_async_callback(router.close)
            for file in files.values():
                stack.enter_context(file)
            counts = {name: (len(wanted[name]) - missing[name], len(wanted[name])) for name in prompts}
            meter = stack.enter_context(Meter(counts))

            def keep(name: str, answer: Answer) -> None:
                files[name].add(answer)
                meter.add(name, answer)

            await answer_questions(
                [QuestionSet(name=name, prompts=of, done=files[name].answers.keys()) for name, of in prompts.items()],
                router, encoder.tokenizer, plan=plan, workflows=workflows, fatal=FAILURES, on_answer=keep,
                timeout_seconds=settings.judging.workflow.timeout_seconds,
                max_in_flight=requests_at_once(
                    max_running=settings.generator.max_running, num_generators=len(generators)
                ),
            )  # fmt: skip
    return {name: [a for n, a in files[name].answers.items() if n in wanted[name]] for name in prompts}


def _workflows(
    settings: EvalSettings, plan: EvaluationPlan, encoder: Encoder, rewards: RecordedRewards
) -> dict[Mode, Workflow]:
    """Return the workflow of the run for greedy and for sampled answers."""
    choice = workflow_choice(settings.judging.workflow)
    sampling: dict[Mode, SamplingParams] = {"greedy": plan.greedy, "sample": plan.sampling}
    return {
        mode: make_workflow(
            choice, tokenizer=encoder.tokenizer, encoder=encoder, reward_pool=rewards, sampling=params, group_size=1,
            seed=plan.seed,
        )
        for mode, params in sampling.items()
    }  # fmt: skip


def _identity(settings: EvalSettings, encoder: Encoder) -> dict[str, object]:
    """Return what determines the answers beside the model, for the file beside them. The number of questions and
    samples may change."""
    questions = {b.name: _hash([(r.query_id, r.prompt, r.solutions) for r in b.rows]) for b in settings.benchmarks}
    sampling = settings.sampling
    return {
        "max_gen_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": settings.seed,
        "prompt_format": asdict(settings.judging.prompt_format),
        "chat_template_hash": encoder.chat_template and _hash(encoder.chat_template),
        **settings.judging.workflow.identity(),
        "reward": settings.judging.reward,
        "right_at": settings.judging.right_at,
        "dtype": settings.generator.dtype,
        "generator": settings.generator.resolved(),
        "sglang": {k: v for k, v in sorted(settings.generator.sglang.items()) if k not in _ANSWERS_STAY_THE_SAME},
        "stop_token_ids": list(encoder.end_token_ids),
        **({"stop": list(settings.judging.stop)} if settings.judging.stop else {}),
        "questions": questions,
    }


def _hash(value: object) -> str:
    return hashlib.blake2b(repr(value).encode()).hexdigest()[:16]
