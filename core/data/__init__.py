"""Batches between the rollout side and the trainer."""
