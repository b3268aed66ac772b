"""The command line of an evaluation, checked and typed: benchmarks, sampling, and how the run samples and judges.

Workflow, reward and prompt are those of the run that saved the model, where its configuration is found: a model is
evaluated as it was trained. What the command line gives wins.
"""

import argparse
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from config_schema.section import fields_by_key
from core.checks.rules import load_config
from core.config.experiments import EXPERIMENTS
from core.config.parsing.problems import ConfigError
from core.config.parsing.yaml_tree import read_yaml
from core.config.runtime import WorkflowConfig
from core.explore.workflow import workflow_choice
from core.runs.paths import RunPaths
from core.runs.record import CONFIG, is_own, newest_model
from rollout.data.encoder import BOXED_INSTRUCTION, PromptFormat
from rollout.data.rows import columns_by_task
from rollout.data.source import DataSource, Fields
from rollout.plugins import PluginError
from rollout.rewards.load import check_reward, missing_columns
from rollout.rewards.math import RIGHT
from rollout.types import SamplingParams
from rollout.workflows import check_workflow
from tools.eval.data import Benchmark, EvalError, data_folders, find_benchmark
from tools.eval.folder import check_may_be_emptied
from tools.eval.model import GeneratorChoice, find_model, server_arguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Judging:
    """How an answer is sampled and judged."""

    workflow: WorkflowConfig = WorkflowConfig()
    reward: str = "math"
    """Name in REWARDS, or package.module:function."""
    right_at: float | None = RIGHT
    """The reward from which an answer is right. None: not known."""
    max_new_tokens: int = 32768
    stop: Sequence[str] = ()
    """Texts that end an answer."""
    prompt_format: PromptFormat = PromptFormat(instruction=BOXED_INSTRUCTION)
    hints: Fields = Fields()
    """Columns of the run's data set, used where a benchmark has them."""


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
    judging: Judging
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
    given.model_path = newest_of_run(given.model_path)
    find_model(given.model_path)
    judging = judging_from(given)
    like = DataSource(
        path="", split=given.split, subset=given.subset,
        fields=Fields(
            prompt=given.prompt_field, answer=given.answer_field, messages=given.messages_field,
            choices=given.choices_field,
        ),
        hints=judging.hints,
    )  # fmt: skip
    found = [find_benchmark(name, folders, like, solved=judging.reward == "math") for name in names]
    twice = {b.name for b in found if sum(other.name == b.name for other in found) > 1}
    if twice:
        raise EvalError(f"--data_names: {', '.join(sorted(twice))} twice; their answers would go into one file")
    for one in found:
        if missing := missing_columns(judging.reward, judging.workflow.types, columns_by_task(one.rows)):
            raise EvalError(f"--data_names {one.name}: {missing}")
    generator = GeneratorChoice(
        backend=given.generator, tensor_parallel=given.tensor_parallel, max_running=given.max_running,
        dtype=given.dtype, sglang_python=given.sglang_python, sglang=server_arguments(given.sglang),
    )  # fmt: skip
    generator.check()
    if given.overwrite:
        check_may_be_emptied(given.output_path, needed=[given.model_path, *(Path(b.source.path) for b in found)])
    return EvalSettings(
        model_path=given.model_path,
        output_path=given.output_path,
        benchmarks=found,
        num_questions=given.num_questions,
        num_samples=given.n_sampling,
        sampling=SamplingParams(
            max_new_tokens=judging.max_new_tokens, temperature=given.temperature, top_p=given.top_p
        ),
        seed=given.seed,
        judging=judging,
        generator=generator,
        reward_workers=given.reward_workers,
        overwrite=given.overwrite,
    )  # fmt: skip


def judging_from(given: argparse.Namespace) -> Judging:
    """Return how the run that saved the model samples and judges, with what the command line changes. Raises
    EvalError."""
    file = given.config
    if file is None and not given.ignore_run:
        file = _own_config_of(given.model_path)
    judging = Judging() if file is None else _judging_of_run(file)
    if file is not None:
        logger.info("Workflow, reward, prompt and tokens per completion of the run: %s", file)
    if given.reward is not None:
        boxed = BOXED_INSTRUCTION if given.reward == "math" else ""
        judging = replace(
            judging,
            reward=given.reward,
            right_at=RIGHT if given.reward == "math" else None,
            prompt_format=replace(judging.prompt_format, instruction=boxed),
        )
    if given.right_at is not None:
        judging = replace(judging, right_at=given.right_at)
    if given.max_gen_tokens is not None:
        judging = replace(judging, max_new_tokens=given.max_gen_tokens)
    if given.workflow is not None:
        judging = replace(judging, workflow=judging.workflow.replaced_by(given.workflow))
    changes = {"template": given.prompt_template, "system": given.system, "instruction": given.instruction}
    changed = {key: value for key, value in changes.items() if value is not None}
    judging = replace(judging, prompt_format=replace(judging.prompt_format, **changed))
    template = judging.prompt_format.template
    if template is not None and "{prompt}" not in template:
        raise EvalError(f"--prompt_template {template!r} has no {{prompt}}; write it where the question belongs")
    with _way_out("reward", judging.reward, given, file):
        check_reward(judging.reward)
    for workflow in judging.workflow.types:
        with _way_out("workflow", workflow, given, file):
            check_workflow(workflow)
    try:
        workflow_choice(judging.workflow)
    except ConfigError as error:
        raise EvalError(str(error)) from error
    return judging


@contextmanager
def _way_out(option: str, plugin: str, given: argparse.Namespace, file: Path | None) -> Iterator[None]:
    """Raise a PluginError again as an EvalError that lists what to do, if the plug-in comes from `file`, the
    configuration of the run, and not from the command line."""
    try:
        yield
    except PluginError as error:
        if file is None or getattr(given, option) is not None:
            raise
        module = plugin.partition(":")[0].partition(".")[0]
        without = "use the defaults (--ignore_run)" if given.config is None else "give another --config"
        raise EvalError(
            f"{error}. It is the {option} of the run ({file}): run this command in the folder that contains "
            f"{module}.py or {module}/, add that folder to PYTHONPATH, use another one (--{option} math), or {without}"
        ) from error


def _own_config_of(model: Path) -> Path | None:
    """Return the configuration beside a model, unless it came from elsewhere with it: it may name code to run."""
    file = config_of(model)
    if file is None or is_own(file):
        return file
    logger.warning(
        "%s was not written by a run of this user: the defaults are used, not its workflow, reward and prompt. "
        "--config %s takes them, and runs the code that they name; --ignore_run omits this warning",
        file,
        file,
    )
    return None


def newest_of_run(path: Path) -> Path:
    """Return the newest model of a run whose folder of logs or of models is given; any other path as it is."""
    paths = RunPaths.of_folder(path)
    if paths is None or path.absolute() == paths.recover:
        return path
    newest = newest_model(paths)
    if newest is None:
        raise EvalError(f"--model_path {path}: the run has saved no model below {paths.checkpoints}")
    logger.info("The newest model of the run: %s", newest)
    return newest


def config_of(model: Path) -> Path | None:
    """Return the configuration of the run that saved a model or a recover checkpoint: {root}/logs/{trial}/config.yaml
    of {root}/checkpoints/{trial}/... None: there is none."""
    path = model.absolute()
    for root in path.parents:
        trial = path.relative_to(root).parts[:3]
        if root.name in ("checkpoints", "recover") and len(trial) == 3:
            file = root.parent.joinpath("logs", *trial, CONFIG)
            return file if file.is_file() else None
    return None


def _judging_of_run(file: Path) -> Judging:
    try:
        config = load_config(_experiment_of(read_yaml(file).children), file).config
    except (ConfigError, OSError) as error:
        raise EvalError(
            f"{file}: the configuration of the run cannot be read; give another --config, or --ignore_run to evaluate "
            f"with the defaults and --workflow, --reward, --prompt_template: {error}"
        ) from error
    judged = config.judged_by
    return Judging(
        workflow=judged.workflow,
        reward=judged.reward,
        right_at=judged.right_at,
        max_new_tokens=judged.max_new_tokens or Judging.max_new_tokens,
        stop=judged.stop,
        prompt_format=config.prompt.prompt_format(boxed=judged.reward == "math"),
        hints=config.dataset.columns,
    )


def _experiment_of(keys: Iterable[str]) -> str:
    """Return the experiment that has most of these keys; of several, the one with the fewest others."""
    given = set(keys)

    def rank(name: str) -> tuple[int, int]:
        known = fields_by_key(EXPERIMENTS[name]).keys()
        return len(given & known), -len(known)

    return max(EXPERIMENTS, key=rank)
