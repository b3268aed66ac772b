"""How generators fail, by the same names for every backend; and whether a workflow that keeps failing skips the prompt
or ends the run.

The driver (core/launch/remote.py) answers failures of generators with a new attempt: new processes may do better.
"""

import traceback
from collections import deque
from collections.abc import Iterator
from typing import Literal

OnError = Literal["skip", "fail"]
_WINDOW = 100
"""Prompts that the share of failed ones refers to."""
_SHOWN = 500
"""Characters of an error in the message of another one."""
_SKIP = "set workflow.on_error=skip"


class GeneratorStartError(RuntimeError):
    """A generator failed at start or was not ready in time. The message ends with the last lines of its log."""


class GeneratorCallError(RuntimeError):
    """A generator refused a call, or lacks it. The message names the generator and carries its answer."""


class GeneratorGone(ConnectionError):
    """A generator cannot be reached or did not answer in time. The message names it."""


class WorkflowFailureError(ValueError):
    """The workflow failed too often. Another attempt would run it on the same prompts with the same seeds."""


class ServiceFailureError(RuntimeError):
    """The workflow failed too often because of another process, such as a service that it calls: another attempt may
    find it again."""


class ErrorPolicy:
    """Decides whether the run goes on after a workflow has failed for a prompt, out of retries.

    With "skip" it does, while at most `max_share` of the last 100 prompts have failed. Errors of type `always_fatal`
    are those of the run's own processes, not of the prompt: another attempt may not meet them."""

    def __init__(
        self, *, on_error: OnError, max_share: float = 0.1, always_fatal: tuple[type[Exception], ...] = ()
    ) -> None:
        self._on_error, self._max_share, self.always_fatal = on_error, max_share, always_fatal
        self._last: deque[bool] = deque(maxlen=_WINDOW)

    def count(self, *, failed: bool) -> None:
        """Record the end of a prompt."""
        self._last.append(failed)

    def ends_run(self, error: Exception, *, runs: int) -> Exception | None:
        """Return the error that ends the run, after a prompt that is counted has failed `runs` times, with `error` the
        last time; None: the prompt is skipped."""
        if isinstance(error, self.always_fatal):
            return error
        if self._on_error == "fail":
            message = f"the workflow failed {runs} times for one prompt (workflow.on_error=fail)"
            return _failure(message, error, way_out=_SKIP, of_others=self.always_fatal)
        if sum(self._last) <= self._max_share * _WINDOW:
            return None
        return _failure(
            f"the workflow failed for {sum(self._last)} of the last {len(self._last)} prompts, more than "
            f"workflow.max_error_share={self._max_share:g} of {_WINDOW} may",
            error,
            way_out="raise workflow.max_error_share",
            of_others=self.always_fatal,
        )


def evaluation_failure(error: Exception, of_others: tuple[type[Exception], ...]) -> Exception:
    """Return the error that ends a run with "fail" whose workflow raised `error` in an evaluation. `of_others`: errors
    of the run's own processes."""
    message = "the workflow failed in an evaluation (workflow.on_error=fail)"
    return _failure(message, error, way_out=_SKIP, of_others=of_others)


def _failure(message: str, error: Exception, *, way_out: str, of_others: tuple[type[Exception], ...]) -> Exception:
    """Return what ends the run, with the traceback of `error`, the last one that the workflow raised."""
    last = f"{type(error).__name__}: {error}".removesuffix(": ").partition("\n")[0][:_SHOWN]
    transient = any(isinstance(one, (*of_others, ConnectionError, TimeoutError)) for one in _chain(error))
    kind = ServiceFailureError if transient else WorkflowFailureError
    failure = kind(f"workflow.type: {message}; correct the cause, or {way_out}. The last error: {last}")
    # A note, not a cause: it is sent to the driver with the error, and the place in the user's file is its last frame.
    failure.add_note("".join(traceback.format_exception(error)))
    return failure


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, those that it contains, and those that led to it."""
    yield error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    for other in (*inner, *([before] if before else [])):
        yield from _chain(other)
