"""Workflows by name or import path."""

from __future__ import annotations

import inspect
from typing import Any

from rollout.plugins import PluginError, build_plugin, check_factory, unknown_name
from rollout.types import Workflow
from rollout.workflows.single_turn import SingleTurnMathWorkflow

WORKFLOWS: dict[str, type] = {"math": SingleTurnMathWorkflow}
_METHODS = {"run": ("prompt", "generator")}


def check_workflow(spec: str) -> None:
    """Check `spec` as far as possible before there are settings for make_workflow. Raises PluginError."""
    if ":" in spec:
        settings = inspect.signature(SingleTurnMathWorkflow).parameters
        check_factory(spec, kind="workflow", methods=_METHODS, settings=settings)
    elif spec not in WORKFLOWS:
        raise PluginError(unknown_name(spec, kind="workflow", known=sorted(WORKFLOWS), own="Class"))


def make_workflow(spec: str, **settings: Any) -> Workflow:
    """Return the workflow called `spec`: a name in WORKFLOWS or an import path "pkg.mod:Name" of a class or factory.

    `settings` are those of SingleTurnMathWorkflow: tokenizer, reward_pool, sampling, group_size, seed.
    Raises PluginError.
    """
    if spec in WORKFLOWS:
        workflow: Workflow = WORKFLOWS[spec](**settings)
        return workflow
    built: Workflow = build_plugin(spec, kind="workflow", methods=_METHODS, **settings)
    return built
