"""Workflows: from one prompt to its trajectories."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field

from config_schema.section import Section
from rollout.data.encoder import Encoder
from rollout.plugins import PluginError, build_plugin, check_factory, find_plugin, unknown_name
from rollout.trajectories import TrajectoryBuilder, sample_seed
from rollout.types import Completion, GenerateRequest, Prompt, Sampler, Trajectory, Workflow
from rollout.workflows.single_turn import SingleTurnMathWorkflow

__all__ = [
    "WORKFLOWS",
    "SingleTurnMathWorkflow",
    "TrajectoryBuilder",
    "WorkflowChoice",
    "by_task_set",
    "check_workflow",
    "close_workflow",
    "make_workflow",
    "sample_seed",
]


WORKFLOWS = {
    "math": "rollout.workflows.single_turn:SingleTurnMathWorkflow",
    "endpoint": "rollout.workflows.endpoint:EndpointWorkflow",
    "environment": "rollout.workflows.environment:EnvironmentWorkflow",
    "tools": "rollout.workflows.tools:ToolsWorkflow",
}
"""Import path of each name."""
_METHODS = {"run": ("prompt", "generator")}


@dataclass(frozen=True, kw_only=True)
class WorkflowChoice:
    """Which workflow a prompt gets, as plain values that other processes can read."""

    type: str = "math"
    """Name in WORKFLOWS, or package.module:Class."""
    by_task: Mapping[str, str] = field(default_factory=dict)
    """The type of other tasks, by the task of a prompt."""
    options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """By type: the checked fields of its class Config."""

    @property
    def types(self) -> tuple[str, ...]:
        """Every type once."""
        return tuple(dict.fromkeys((self.type, *self.by_task.values())))


def check_workflow(spec: str) -> type[Section] | None:
    """Check `spec` as far as possible before there are settings for make_workflow; return its class `Config`, or None.
    Raises PluginError."""
    path = _path(spec)
    settings = inspect.signature(SingleTurnMathWorkflow).parameters
    check_factory(path, kind="workflow", methods=_METHODS, settings=[*settings, *_extras(path)])
    return getattr(find_plugin(path, kind="workflow"), "Config", None)


def make_workflow(choice: str | WorkflowChoice, *, encoder: Encoder | None = None, **settings: object) -> Workflow:
    """Return the workflow of a choice, or of a type: a name in WORKFLOWS, or an import path.

    `settings` are those of SingleTurnMathWorkflow: tokenizer, reward_pool, sampling, group_size, seed. A class with a
    class `Config` also gets `options`, an instance of it, and one with a parameter `encoder` the one of the prompts.
    Raises PluginError.
    """
    if isinstance(choice, str):
        choice = WorkflowChoice(type=choice)
    made = {spec: _make(spec, choice.options.get(spec, {}), encoder, settings) for spec in choice.types}
    return _ByTask(made, choice) if choice.by_task else made[choice.type]


async def close_workflow(workflow: Workflow) -> None:
    """End what a workflow has started, if it has a method close()."""
    if (close := getattr(workflow, "close", None)) is not None:
        await close()


def _path(spec: str) -> str:
    if spec not in WORKFLOWS and ":" not in spec:
        raise PluginError(unknown_name(spec, kind="workflow", known=sorted(WORKFLOWS), own="Class"))
    return WORKFLOWS.get(spec, spec)


def _extras(path: str) -> list[str]:
    """Return the settings that a class or factory takes beside those of every workflow."""
    found = find_plugin(path, kind="workflow")
    takes_encoder = callable(found) and "encoder" in inspect.signature(found).parameters
    return ["options"] * hasattr(found, "Config") + ["encoder"] * takes_encoder


def _make(
    spec: str, options: Mapping[str, object], encoder: Encoder | None, settings: Mapping[str, object]
) -> Workflow:
    path = _path(spec)
    extras: dict[str, object] = {}
    for name in _extras(path):
        own = find_plugin(path, kind="workflow")
        extras[name] = encoder if name == "encoder" else own.Config(**options)
    built: Workflow = build_plugin(path, kind="workflow", methods=_METHODS, **settings, **extras)
    return built


def by_task_set(workflows: Mapping[str, Workflow]) -> Workflow:
    """Return the workflow that runs the one of the prompt's task set."""
    return _ByTaskSet(workflows) if len(workflows) > 1 else next(iter(workflows.values()))


class _Named:
    """The generators under request ids of one task set: rows of two sets may have the same query_id."""

    def __init__(self, generator: Sampler, name: str) -> None:
        self._generator, self._name = generator, name

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._generator.generate(request.named(self._name))


class _ByTaskSet:
    def __init__(self, workflows: Mapping[str, Workflow]) -> None:
        self._workflows = workflows

    async def run(self, prompt: Prompt, generator: Sampler) -> list[Trajectory]:
        return await self._workflows[prompt.task_set].run(prompt, _Named(generator, prompt.task_set))

    async def close(self) -> None:
        """Close every workflow."""
        for workflow in self._workflows.values():
            await close_workflow(workflow)


class _ByTask:
    """Runs the workflow of the prompt's task."""

    def __init__(self, made: Mapping[str, Workflow], choice: WorkflowChoice) -> None:
        """`made`: by type."""
        self._made, self._choice = made, choice

    async def run(self, prompt: Prompt, generator: Sampler) -> list[Trajectory]:
        spec = self._choice.by_task.get(prompt.task, self._choice.type)
        return await self._made[spec].run(prompt, generator)

    async def close(self) -> None:
        """Close every workflow."""
        for workflow in self._made.values():
            await close_workflow(workflow)
