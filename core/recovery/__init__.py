"""Recover checkpoints and memory limits that outlive an attempt."""
