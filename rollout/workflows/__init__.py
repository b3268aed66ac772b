"""Workflows: from one prompt to its trajectories."""

from rollout.trajectories import TrajectoryBuilder, sample_seed
from rollout.workflows.builder import WORKFLOWS, WorkflowChoice, check_workflow, close_workflow, make_workflow
from rollout.workflows.single_turn import SingleTurnMathWorkflow

__all__ = [
    "WORKFLOWS",
    "SingleTurnMathWorkflow",
    "TrajectoryBuilder",
    "WorkflowChoice",
    "check_workflow",
    "close_workflow",
    "make_workflow",
    "sample_seed",
]
