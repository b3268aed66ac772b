"""Sandbox: Python code that a model wrote, run without access to the host."""
