"""Which workflow a run has, with its options as their classes read them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from config_schema.section import Section
from core.config.load import bind
from core.config.parsing.problems import ConfigError, Problem
from core.config.ppo import SetConfig
from core.config.runtime import WorkflowConfig
from rollout.plugins import PluginError
from rollout.workflows import WorkflowChoice, check_workflow


def workflow_choice(config: WorkflowConfig) -> WorkflowChoice:
    """Return the workflow of each task. Raises ConfigError with every problem there is."""
    problems: list[Problem] = []
    sections: dict[str, type[Section] | None] = {}
    choice = WorkflowChoice(type=config.type, by_task=config.by_task)
    keys = {spec: f"workflow.by_task.{task}" for task, spec in config.by_task.items()} | {config.type: "workflow.type"}
    for spec in choice.types:
        try:
            sections[spec] = check_workflow(spec)
        except PluginError as error:
            problems.append(Problem(key=keys[spec], message=str(error)))
    if problems:
        raise ConfigError(problems)
    classes = {spec: own for spec, own in sections.items() if own is not None}
    if config.options and not classes:
        message = f"{', '.join(config.options)}: {config.type} has no options; they are the fields of its class Config"
        raise ConfigError([Problem(key="workflow.options", message=message)])
    return WorkflowChoice(
        type=config.type,
        by_task=config.by_task,
        options={spec: _read(own, config, alone=len(classes) == 1) for spec, own in classes.items()},
    )


def task_set_workflow(config: WorkflowConfig, at: str, one: SetConfig) -> WorkflowChoice:
    """Return the workflow of a set whose section is `at`. Raises ConfigError with every problem there is."""
    if one.workflow is None:
        return workflow_choice(config)
    try:
        return workflow_choice(_of_set(config, one))
    except ConfigError as error:
        raise ConfigError([_in_set(at, problem) for problem in error.problems]) from None


def _of_set(config: WorkflowConfig, one: SetConfig) -> WorkflowConfig:
    return config.model_copy(update={"type": one.workflow, "by_task": {}, "options": one.workflow_options})


def _in_set(at: str, problem: Problem) -> Problem:
    """Return a problem of workflow.* as one of the set whose keys it is about."""
    key = problem.key.replace("workflow.options", "workflow_options", 1).replace("workflow.type", "workflow", 1)
    return replace(problem, key=f"{at}.{key}")


def _read(own: type[Section], config: WorkflowConfig, *, alone: bool) -> dict[str, object]:
    """Return the options of one of the workflows. With several, each reads its own fields."""
    given = {name: value for name, value in config.options.items() if alone or name in own.model_fields}
    return bind(own, given, "workflow.options.").model_dump()


def check_workflows(config: WorkflowConfig, sets: Mapping[str, SetConfig]) -> Iterator[Problem]:
    """Yield what is wrong with workflow.*, and with the workflows of sets, by their sections."""
    yield from _check(config)
    for at, one in sets.items():
        if one.workflow is not None:
            yield from (_in_set(at, problem) for problem in _check(_of_set(config, one)))


def _check(config: WorkflowConfig) -> Iterator[Problem]:
    try:
        choice = workflow_choice(config)
    except ConfigError as error:
        yield from error.problems
        return
    known = {name for options in choice.options.values() for name in options}
    for name in config.options.keys() - known:
        yield Problem(key=f"workflow.options.{name}", message=f"unknown key; keys are {', '.join(sorted(known))}")
