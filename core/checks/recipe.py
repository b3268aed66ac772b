"""Checks of a recipe: its models, data, rewards, workflows and checkpoints, wherever it will run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from allocation import AllocationError
from core.algorithms.build import check_algorithm
from core.checks.resumption import ReadStream, check_checkpoint, check_prompts, check_rows, check_settings
from core.checks.rules import read_shape
from core.config.common import ModelUse
from core.config.experiments import DPOConfig, ExperimentConfig, PPOMATHConfig, SFTConfig
from core.config.parsing.problems import Problem
from core.config.ppo import SetConfig, TaskSetConfig
from core.explore.workflow import check_workflows
from core.placement import resolve_allocation
from core.placement.rules import nearest_allocation, split_errors
from core.runs.checkpoints import read_stream
from model_specs import hub
from model_specs.config import ModelConfig
from model_specs.families import FAMILIES
from model_specs.model_folder import ModelFolderError, read_model_folder
from model_specs.tensors import hf_shapes
from model_specs.weight_files import serving_problems
from rollout.data.prompts import check_lengths, num_surely_fitting
from rollout.data.rows import Row, by_column, columns_by_task, read_examples, read_preferences, scan_rows
from rollout.data.source import DatasetError, DataSource
from rollout.inference.registry import BACKENDS
from rollout.plugins import PluginError
from rollout.rewards.load import check_reward, missing_columns

if TYPE_CHECKING:
    from core.data.datasets import Rows

logger = logging.getLogger(__name__)

T = TypeVar("T")


def recipe_problems(config: ExperimentConfig, *, lengths: bool) -> Iterator[Problem]:
    """Yield the problems of the recipe: of models, data, plug-ins and checkpoints, wherever it will run. `lengths`:
    measure prompts, or rows of sft and dpo, in tokens, too."""
    read = cache(read_stream)  # it may be large, and two checks need it
    models = list(_models(config))
    yield from models
    lengths = lengths and not any(problem.key.endswith(".path") for problem in models)  # they may have no tokenizer
    if (sampled := config.sampling) is not None:
        rewards = list(_reward(sampled))
        yield from _prompts(sampled, lengths=lengths, with_columns=not rewards, read=read)
        yield from rewards
        for check in (_workflow, _curricula, _store, _quantization, _auxiliary, _loaded, check_algorithm):
            yield from check(sampled)
    else:
        yield from _rows(cast("SFTConfig | DPOConfig", config), lengths=lengths, read=read)
    yield from check_checkpoint(config)
    yield from check_settings(config, read)


def _models(config: ExperimentConfig) -> Iterator[Problem]:
    vocabularies: dict[str, int] = {}
    for use in config.model_uses:
        try:
            model = read_model_folder(
                use.path,
                weights=use.section.loads_weights and not hub.lacks_weights(use.path),
                tokenizer=use.tokenizer,
                value_head=use.value_head,
            )
        except ModelFolderError as error:
            yield Problem(key=f"{use.key}.path", message=str(error))
            continue
        vocabularies[use.key] = model.vocab_size
        yield from _family(use, model)
        yield from _positions(config, use, model)
        yield from _split(config, use, model)
    if len(set(vocabularies.values())) > 1:
        sizes = ", ".join(f"{key} {size}" for key, size in vocabularies.items())
        yield Problem(key="actor.path", message=f"the models must share one vocabulary; vocab_size of {sizes}")


def _family(use: ModelUse, model: ModelConfig) -> Iterator[Problem]:
    family = use.section.type.family
    if family not in ("auto", model.model_type):
        known = "" if family in FAMILIES else f" ({family!r} is not one of {', '.join(sorted(FAMILIES))})"
        message = f"{family!r}, but config.json of {use.path} has {model.model_type!r}{known}; write that, or auto"
        yield Problem(key=f"{use.key}.type._class", message=message)


def _auxiliary(config: PPOMATHConfig) -> Iterator[Problem]:
    """Check the model of auxiliary.path, and the layout of its servers, which is that of the generators."""
    path = config.auxiliary_model
    if not path:
        return
    try:
        model = read_model_folder(path, weights=not hub.lacks_weights(path), tokenizer=True, value_head=False)
        placed = resolve_allocation(config).generator
    except ModelFolderError as error:
        yield Problem(key="auxiliary.path", message=str(error))
    except AllocationError:
        return  # reported elsewhere
    else:
        for _, message in BACKENDS[placed.backend].model_problems(model, path):
            yield Problem(key="auxiliary.path", message=message)
        for refused in split_errors(placed.layout, placed.role, model, path):
            yield Problem(key="auxiliary.path", message=str(refused).removeprefix(f"{refused.key}: "))


def _loaded(config: PPOMATHConfig) -> Iterator[Problem]:
    """Check the models that a job without a trainer loads into the generators of actor.path."""
    model = read_shape(config.model_folder)
    for key, path in config.loaded_models:
        folder = Path(path).expanduser()
        if not folder.is_dir():
            yield Problem(key=key, message=f"{path}: no such folder; write a Hugging Face folder")
            continue
        try:
            own = read_model_folder(str(folder), weights=True, tokenizer=False, value_head=False)
        except ModelFolderError as error:
            yield Problem(key=key, message=str(error))
            continue
        if model is not None and hf_shapes(own, is_critic=False) != hf_shapes(model, is_critic=False):
            message = f"{path}: its tensors have other shapes than those of actor.path={config.model_folder}"
            yield Problem(key=key, message=f"{message}; write that model's folder as actor.path of a job of its own")


def _quantization(config: PPOMATHConfig) -> Iterator[Problem]:
    """Check that generators can hold the actor in FP8."""
    if not config.generator.quantizes:
        return
    path = config.model_folder
    try:
        tp = resolve_allocation(config).generator.layout.tp
        model = read_model_folder(path, weights=False, tokenizer=False)
    except (AllocationError, ModelFolderError):
        return  # reported elsewhere
    for message in serving_problems(model, tp):
        yield Problem(key="generator.weight_format", message=f"{message} ({path}); write auto")


def _positions(config: ExperimentConfig, use: ModelUse, model: ModelConfig) -> Iterator[Problem]:
    """Check that sequences fit into the model's positions, before the first prompt is sampled."""
    sampled = config.sampling
    for key, (prompt_tokens, num_tokens) in sampled.longest_sequences.items() if sampled is not None else ():
        length, limit = prompt_tokens + num_tokens, model.max_position_embeddings
        if length > limit:
            message = f"{num_tokens} + dataset.max_prompt_len={prompt_tokens} is {length}, more than "
            yield Problem(
                key=key, message=message + f"max_position_embeddings={limit} of {use.path}; lower one of them"
            )


def _split(config: ExperimentConfig, use: ModelUse, model: ModelConfig) -> Iterator[Problem]:
    """Yield layouts that do not divide heads, layers or vocabulary; one message where several roles break the same
    rule."""
    try:
        allocation = resolve_allocation(config)
    except AllocationError:
        return  # a rule of the configuration reports it
    seen: set[str] = set()
    for role in use.roles:
        placed = allocation.roles[role]
        if placed.backend in BACKENDS:
            for key, message in BACKENDS[placed.backend].model_problems(model, use.path):
                yield Problem(key=key, message=message)
        for error in split_errors(placed.layout, role, model, use.path):
            message = str(error).removeprefix(f"{error.key}: ")
            rule = message.removeprefix(f"{role}:")
            if rule not in seen:
                if not seen and (near := nearest_allocation(config, allocation)):
                    message += f", as in {near}"
                seen.add(rule)
                yield Problem(key=error.key, message=message)


def _prompts(config: PPOMATHConfig, *, lengths: bool, with_columns: bool, read: ReadStream) -> Iterator[Problem]:
    """Check the rows of every data set, with `with_columns` whether rewards find theirs, and with `lengths` how many
    prompts are short enough; then whether a recover checkpoint can be continued with them."""
    model, longest = Path(config.model_folder), config.trained_tokens[0]
    trained: list[Row] = []

    def scan(placed: tuple[SetConfig, DataSource]) -> None:
        one, source = placed
        rows = scan_rows(source, solved=config.judged_by_math(one))
        if isinstance(one, TaskSetConfig) and one.column:
            by_column(rows, one.column, source.path)
        if not trained:
            trained.extend(rows)
        if with_columns:
            _check_columns(config, one, source, rows)
        if lengths:
            written = config.set_format(one)
            check_lengths(source.path, rows, model=model, prompt_format=written, max_prompt_len=longest)

    sets = ((f"{at}.path", (one, source)) for at, one, source in config.placed_sets)
    found = list(_data_sets(config, sets, scan))
    yield from found
    if not found and not config.task_sets:  # of several sets the run compares each
        yield from check_prompts(
            config,
            trained,
            read,
            lambda: num_surely_fitting(
                trained, model=model, prompt_format=config.prompt_format, max_prompt_len=longest
            ),
        )
    if config.demonstrations.are_given:
        try:
            if (columns := config.demonstration_pairs) is None:
                read_examples(config.demonstrations.path)
            else:
                read_preferences(config.demonstrations.path, columns)
        except DatasetError as error:
            yield Problem(key="demonstrations.path", message=str(error))


def _check_columns(config: PPOMATHConfig, one: SetConfig, source: DataSource, rows: Iterable[Row]) -> None:
    """Check that rewards find the columns that they ask for. Raises DatasetError."""
    spec = config.set_reward(one)
    workflows = config.workflow.types if one.workflow is None else (one.workflow,)
    if missing := missing_columns(spec, workflows, columns_by_task(rows)):
        key = next(key for key, other in config.rewards.items() if other == spec)
        raise DatasetError(f"{source.path}: {missing}", setting=key)


def _rows(config: SFTConfig | DPOConfig, *, lengths: bool, read: ReadStream) -> Iterator[Problem]:
    """Check the rows of every data set. With `lengths` tokenise and count them as the run does at its start, report
    its steps, and check whether a recover checkpoint can be continued with these rows."""
    columns = config.pair_columns
    if not lengths:
        read_rows = read_examples if columns is None else partial(read_preferences, fields=columns)
        yield from _data_sets(config, config.data_sources, read_rows)
        return
    from core.data.datasets import open_sample, opener  # imports torch

    open_one = cache(partial(opener, config))
    for number, (key, source) in enumerate(config.data_sources):
        try:
            data = open_sample(open_one(), source)
        except DatasetError as error:
            yield _of_data(config, key, error)
            continue
        if number == 0:  # the rows to train on
            _report_steps(data, config)
            yield from check_rows(config, data, read)


def _report_steps(data: Rows, config: SFTConfig | DPOConfig) -> None:
    """Log how many steps a run makes of the data set that it trains on."""
    from core.train.periodic import schedule_from_control  # imports torch

    count = round(len(data) / data.share)
    schedule = schedule_from_control(config.exp_ctrl, num_prompts=count, batch_size=config.batch_size)
    logger.info(
        "%s: %s%d %s of %.1f tokens on average: %d steps per epoch with dataset.train_bs_n_seqs=%d, %d steps in all",
        config.dataset.train_path, "" if data.share == 1 else "about ", count, data.ITEMS, data.mean_tokens,
        schedule.steps_per_epoch, config.batch_size, schedule.total_steps,
    )  # fmt: skip


def _data_sets(
    config: ExperimentConfig, sets: Iterable[tuple[str, T]], scan: Callable[[T], object]
) -> Iterator[Problem]:
    """Yield what is wrong with data sets. `sets`: (key of its path, what `scan` reads it by) of each."""
    for key, one in sets:
        try:
            scan(one)
        except DatasetError as error:
            yield _of_data(config, key, error)


def _of_data(config: ExperimentConfig, key: str, error: DatasetError) -> Problem:
    """Return the problem of a data set whose path is `key`, with the key of the setting that is wrong."""
    if error.setting == "model":
        return Problem(key=f"{config.model_uses[0].key}.path", message=str(error))
    setting = error.setting if "." in error.setting else f"{key.rpartition('.')[0]}.{error.setting}"
    return Problem(key=setting if error.setting else key, message=str(error))


def _reward(config: PPOMATHConfig) -> Iterator[Problem]:
    for key, spec in config.rewards.items():
        try:
            check_reward(spec)
        except PluginError as error:
            yield Problem(key=key, message=str(error))


def _curricula(config: PPOMATHConfig) -> Iterator[Problem]:
    for name, one in config.task_sets.items():
        if one.scored_by is None:
            continue
        from rollout.data.task_sets import load_curriculum  # imports numpy

        try:
            load_curriculum(one.scored_by)
        except PluginError as error:
            yield Problem(key=f"task_sets.{name}.curriculum", message=str(error))


def _workflow(config: PPOMATHConfig) -> Iterator[Problem]:
    yield from check_workflows(config.workflow, config.own_sets)


def _store(config: PPOMATHConfig) -> Iterator[Problem]:
    given = config.experience
    if not given.needs_checks:
        return
    from rollout.experience import StoreError, check_store  # imports numpy, which a dry run does without
    from rollout.experience.serial import SchemaError

    for key, check in {
        "store": lambda: check_store(given.store, "" if config.job in ("bench", "serve") else config.experience_path),
        "replay.priority": given.replay.make_priority,
        "processors": given.load_processors,
    }.items():
        try:
            check()
        except PluginError as error:
            yield Problem(key=f"experience.{key}", message=str(error))
        except (SchemaError, StoreError) as error:
            yield Problem(key="experience.path", message=str(error))
