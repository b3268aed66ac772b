"""Errors that more than one part of core names, importable without Ray or torch."""

from __future__ import annotations


class LaunchError(RuntimeError):
    """The cluster could not be started, or a worker of it died or did not answer. The message says which."""
