"""Workflows: from one prompt to its trajectories."""

from rollout.trajectories import TrajectoryBuilder, sample_seed
from rollout.workflows.builder import (
    WORKFLOWS,
    WorkflowChoice,
    by_task_set,
    check_workflow,
    close_workflow,
    make_workflow,
)
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
