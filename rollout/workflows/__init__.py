"""Workflows: from one prompt to its trajectories."""

from rollout.workflows.builder import WORKFLOWS, check_workflow, make_workflow
from rollout.workflows.single_turn import SingleTurnMathWorkflow
from rollout.workflows.trajectories import build_trajectory, sample_seed

__all__ = [
    "WORKFLOWS",
    "SingleTurnMathWorkflow",
    "build_trajectory",
    "check_workflow",
    "make_workflow",
    "sample_seed",
]
