"""Metrics, logs and experiment trackers."""
