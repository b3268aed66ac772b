"""Profiles of updates: what their kernels take, by torch's profiler."""
