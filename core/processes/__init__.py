"""Processes of a run: attempts, signals and stack dumps."""
