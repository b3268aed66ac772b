"""The ways in which a generator fails, by the same names for every backend.

The driver (core/launch/wait.py) answers all of them with a new attempt: new processes may do better.
"""

from __future__ import annotations


class GeneratorStartError(RuntimeError):
    """A generator failed at start or was not ready in time. The message ends with the last lines of its log."""


class GeneratorCallError(RuntimeError):
    """A generator refused a call, or lacks it. The message names the generator and carries its answer."""


class GeneratorGone(ConnectionError):
    """A generator cannot be reached or did not answer in time. The message names it."""
