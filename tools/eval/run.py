"""One evaluation from its settings to its table: between the command line (eval.py) and rollout/evaluation.py.

Invariant: what settles an answer (model, benchmark, sampling, template) is written beside the answers before the first
one, and an evaluation is continued only where it is the same.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollout.data.tokenizer import load_tokenizer
from rollout.evaluation import (
    Answer,
    AnswerFile,
    EvaluationPlan,
    QuestionSet,
    answer_questions,
    end_token_ids,
    read_answers,
)
from rollout.inference.embedded.generator import GeneratorError
from rollout.inference.errors import GeneratorCallError, GeneratorStartError
from rollout.inference.router import NoGeneratorError, Router, requests_at_once
from rollout.rewards.pool import RewardPool, RewardWorkerError
from rollout.types import Prompt, SamplingParams
from tools.eval.data import (
    Benchmark,
    EvalError,
    EvalFailure,
    check_template,
    data_folders,
    find_benchmark,
    make_prompts,
    question_template,
)
from tools.eval.meter import Meter
from tools.eval.model import (
    CONVERTED,
    CONVERTING,
    SETTINGS,
    TEMPORARY,
    GeneratorChoice,
    find_model,
    hugging_face_folder,
    is_conversion,
    read_json,
    server_arguments,
    start_generators,
    weights_identity,
    write_json,
)
from tools.eval.report import summarise, unjudged_line, write_report

logger = logging.getLogger(__name__)

_IDENTITY_KEYS = {"model_path", "weights", "max_gen_tokens", "questions"}
"""Keys by which that file is known as an evaluation's."""
_WRITTEN_BESIDE = {SETTINGS, SETTINGS + TEMPORARY, "logs", "results.json", "results.md", "results.png"}
"""What an evaluation writes beside the answers; none of it shows that a folder is one."""
_ANSWERS_STAY_THE_SAME = {"mem_fraction_static", "max_total_tokens", "log_level", "watchdog_timeout"}
"""Server arguments of which an evaluation may be continued with others: what was too little the first time."""
FAILURES = (
    EvalFailure, GeneratorStartError, GeneratorCallError, NoGeneratorError, GeneratorError, RewardWorkerError,
    ConnectionError,
)  # fmt: skip
"""What ends an evaluation while it runs, each with a message for the user."""


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """The command line, typed."""

    model_path: Path
    output_path: Path
    benchmarks: Sequence[Benchmark]
    num_questions: int | None
    """The first so many of each benchmark; None: all."""
    num_samples: int
    sampling: SamplingParams
    seed: int
    prompt_template: str | None
    generator: GeneratorChoice
    reward_workers: int
    overwrite: bool
    """Nothing that `output_path` holds is used."""


def settings_from(given: argparse.Namespace) -> EvalSettings:
    """Check the arguments before anything is started and return the settings. Raises EvalError and DatasetError."""
    for option, ok, rule in (
        ("n_sampling", given.n_sampling >= 0, "at least 0"),
        ("temperature", given.temperature > 0, "greater than 0; the greedy answer is always given too"),
        ("top_p", 0 < given.top_p <= 1, "in (0, 1]"),
    ):
        if not ok:
            raise EvalError(f"--{option} {getattr(given, option)}: must be {rule}")
    folders, names = data_folders(given.data_dir), [n.strip() for n in given.data_names.split(",") if n.strip()]
    if not names:
        raise EvalError("--data_names is empty; name benchmarks, as math_500,aime24")
    fields = {"prompt_field": given.prompt_field, "answer_field": given.answer_field}
    found = [find_benchmark(name, folders, **fields) for name in names]
    twice = {b.name for b in found if sum(other.name == b.name for other in found) > 1}
    if twice:
        raise EvalError(f"--data_names: {', '.join(sorted(twice))} twice; their answers would go into one file")
    find_model(given.model_path)
    if given.prompt_template is not None:
        check_template(given.prompt_template)
    if given.overwrite:
        _check_may_be_emptied(given.output_path, needed=[given.model_path, *(b.path for b in found)])
    return EvalSettings(
        model_path=given.model_path,
        output_path=given.output_path,
        benchmarks=found,
        num_questions=given.num_questions,
        num_samples=given.n_sampling,
        sampling=SamplingParams(
            max_new_tokens=given.max_gen_tokens, temperature=given.temperature, top_p=given.top_p
        ),
        seed=given.seed,
        prompt_template=given.prompt_template,
        generator=GeneratorChoice(
            backend=given.generator, tensor_parallel=given.tensor_parallel, max_running=given.max_running,
            dtype=given.dtype, sglang_python=given.sglang_python, sglang=server_arguments(given.sglang),
        ),
        reward_workers=given.reward_workers,
        overwrite=given.overwrite,
    )  # fmt: skip


def _check_may_be_emptied(folder: Path, *, needed: Sequence[Path]) -> None:
    """Raise EvalError unless the folder is an evaluation's, or empty, and holds nothing that this one reads."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise EvalError(f"--overwrite: --output_path {folder} is no folder")
    if any(folder.iterdir()) and not _is_evaluation(folder):
        raise EvalError(
            f"--overwrite: {folder} is not empty and holds no evaluation ({SETTINGS} of one): nothing is deleted; "
            "give another --output_path, or empty it yourself"
        )
    for path in needed:
        if path.resolve().is_relative_to(folder.resolve()):
            raise EvalError(f"--overwrite would delete {path}, which is needed; give another --output_path")


def _is_evaluation(folder: Path) -> bool:
    """Return whether a folder is an evaluation's, by its settings; where these are missing or damaged, by containing
    only files of an evaluation."""
    try:
        found = read_json(folder / SETTINGS)
    except EvalError:
        found = {}
    if found:
        return found.keys() >= _IDENTITY_KEYS
    full = [path for path in folder.iterdir() if path.is_dir() or path.lstat().st_size > 0]
    others = [path for path in full if path.name not in _WRITTEN_BESIDE]
    return not full or (bool(others) and all(_is_result(path) for path in others))


def _is_result(path: Path) -> bool:
    """Return whether a file belongs to answers or a conversion, complete or not."""
    if path.is_dir():
        return CONVERTING in path.name or (path.name == CONVERTED and is_conversion(path))
    try:
        return path.suffix == ".jsonl" and path.is_file() and bool(read_answers(path))
    except ValueError:
        return False


def _empty(folder: Path, *, keep: Path) -> None:
    for path in folder.iterdir():
        if path == keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


async def evaluate(settings: EvalSettings) -> str:
    """Answer what is not yet answered, write the report, return the table."""
    output = settings.output_path
    output.mkdir(parents=True, exist_ok=True)
    given_model = {"model_path": str(settings.model_path), "weights": weights_identity(settings.model_path)}
    if settings.overwrite:  # the answers go only when everything they could be lost for is checked
        shutil.rmtree(output / CONVERTED, ignore_errors=True)
    else:
        _check_same(output / SETTINGS, given_model)  # before the model of the answers gives way to another one
    model = hugging_face_folder(settings.model_path, output)
    tokenizer = load_tokenizer(model)
    template = question_template(settings.prompt_template, tokenizer)
    for b in settings.benchmarks:
        logger.info(
            "%s: %d questions of %s, question %r, answer %r", b.name, len(b.rows), b.path, b.fields.prompt,
            b.fields.answer,
        )  # fmt: skip
    logger.info("Prompt template: %r", template)
    config = read_json(model / "config.json")
    context = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    ends = end_token_ids(tokenizer, read_json(model / "generation_config.json"))
    prompts = {b.name: make_prompts(b, tokenizer, template)[: settings.num_questions] for b in settings.benchmarks}
    sampling = replace(settings.sampling, stop_token_ids=ends)
    if context and sampling.max_new_tokens > context:
        logger.warning(
            "--max_gen_tokens %d: the model's context of %d ends an answer before", sampling.max_new_tokens, context
        )
    plan = EvaluationPlan(
        num_samples=settings.num_samples,
        sampling=sampling,
        context_tokens=context or 2**31,
        seed=settings.seed,
    )
    for name, of in prompts.items():
        for prompt in of:
            plan.request(name, prompt, "greedy", 0)  # it leaves room for an answer
    identity = given_model | _identity(settings, template, ends)
    if settings.overwrite:
        _empty(output, keep=output / CONVERTED)
    if _check_same(output / SETTINGS, identity) != identity:
        write_json(output / SETTINGS, identity)

    answers = await _answer_all(settings, prompts, model, tokenizer, plan)
    table = write_report(output, [summarise(name, of) for name, of in answers.items()], identity)
    unjudged = unjudged_line(answer for of in answers.values() for answer in of)
    return table if unjudged is None else f"{table}\n{unjudged}"


async def _answer_all(
    settings: EvalSettings, prompts: dict[str, list[Prompt]], model: Path, tokenizer: Any, plan: EvaluationPlan
) -> dict[str, list[Answer]]:
    """Return all answers of every benchmark, old and new. Generators are started only where something is missing; what
    is missing of all benchmarks is one stream of requests, so that none of them waits for another's longest answer."""
    wanted = {name: {n for prompt in of for n in plan.names(prompt)} for name, of in prompts.items()}
    files = {name: AnswerFile(settings.output_path / f"{name}.jsonl") for name in prompts}
    missing = {name: len(wanted[name] - files[name].answers.keys()) for name in prompts}
    if any(missing.values()):
        async with AsyncExitStack() as stack:
            rewards = await stack.enter_async_context(RewardPool("math", num_workers=settings.reward_workers))
            generators = await start_generators(stack, model, settings.generator, settings.output_path / "logs")
            router = Router(generators)
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
                router, rewards, tokenizer, plan=plan, on_answer=keep,
                max_in_flight=requests_at_once(
                    max_running=settings.generator.max_running, num_generators=len(generators)
                ),
            )  # fmt: skip
    return {name: [a for n, a in files[name].answers.items() if n in wanted[name]] for name in prompts}


def _identity(settings: EvalSettings, template: str, ends: Sequence[int]) -> dict[str, Any]:
    """Return what determines the answers beside the model, for the file beside them. The number of questions and
    samples may change."""
    questions = {
        b.name: hashlib.blake2b(repr([(r.query_id, r.prompt, r.solutions) for r in b.rows]).encode()).hexdigest()[:16]
        for b in settings.benchmarks
    }
    sampling = settings.sampling
    return {
        "max_gen_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": settings.seed,
        "prompt_template": template,
        "dtype": settings.generator.dtype,
        "generator": settings.generator.resolved(),
        "sglang": {k: v for k, v in sorted(settings.generator.sglang.items()) if k not in _ANSWERS_STAY_THE_SAME},
        "stop_token_ids": list(ends),
        "questions": questions,
    }


def _check_same(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Hold settings against those of the answers that are there, which are returned; questions of other sets are kept.
    Raises EvalError where they differ."""
    try:
        before = read_json(path)
    except EvalError as error:
        raise EvalError(
            f"{error}; the settings of the completions in {path.parent} are unknown: give another --output_path, or "
            "--overwrite"
        ) from error
    for key, now in identity.items():
        then = before.get(key, now)
        if key == "questions":
            changed = sorted(name for name in now if name in then and then[name] != now[name])
            if changed:
                raise EvalError(
                    f"{', '.join(changed)}: {path.parent} has answers to other questions of that name; give another "
                    "--output_path, or --overwrite"
                )
            now.update({name: value for name, value in then.items() if name not in now})
        elif then != now:
            raise EvalError(
                f"{key}={now!r}: the answers in {path.parent} were made with {then!r}; give the same, another "
                "--output_path, or --overwrite"
            )
    return before
