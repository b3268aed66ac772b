"""Workflows: from one prompt to its trajectories."""
