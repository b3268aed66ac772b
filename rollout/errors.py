"""What a prompt costs whose workflow keeps failing: the prompt, or the run."""

from __future__ import annotations

from collections import deque
from typing import Literal

OnError = Literal["skip", "fail"]
_WINDOW = 100
"""Prompts that the share of failed ones refers to."""


class ErrorPolicy:
    """Decides whether the run goes on after a workflow has failed for a prompt, out of retries.

    With "skip" it does, while at most `max_share` of the last 100 prompts have failed. Errors of type `always_fatal`
    are those of the run's own processes, not of the prompt."""

    def __init__(
        self, *, on_error: OnError, max_share: float = 0.1, always_fatal: tuple[type[Exception], ...] = ()
    ) -> None:
        self._on_error, self._max_share, self.always_fatal = on_error, max_share, always_fatal
        self._last: deque[bool] = deque(maxlen=_WINDOW)

    def count(self, *, failed: bool) -> None:
        """Record the end of a prompt."""
        self._last.append(failed)

    def skips(self, error: Exception) -> bool:
        """Return whether the prompt that failed with `error`, and is counted, is skipped."""
        return self._on_error == "skip" and not isinstance(error, self.always_fatal) and not self.exceeded()

    def exceeded(self) -> str:
        """Return what to report when too many prompts were skipped; empty while they are few enough."""
        if self._on_error == "fail" or sum(self._last) <= self._max_share * _WINDOW:
            return ""
        return (
            f"the workflow failed for {sum(self._last)} of the last {len(self._last)} prompts, more than "
            f"workflow.max_error_share={self._max_share:g} of {_WINDOW} may"
        )
