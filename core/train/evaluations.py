"""Evaluations beside training: on a generator that keeps its weights, while the others sample and the trainer trains.

Without a generator to spare, the trainer waits. Figures are filed under the step whose weights were measured. One
evaluation runs at a time; one that becomes due meanwhile measures the first weights after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class Evaluator(Protocol):
    """The rollout process (core/launch/rollout_client.py)."""

    def evaluate(self, step: int, meanwhile: Callable[[], None]) -> dict[str, float]: ...
    def begin_evaluation(self, step: int, on: str) -> Any: ...
    def wait_evaluated(self, call: Any, meanwhile: Callable[[], None]) -> dict[str, float]: ...
    def release_generator(self, name: str) -> None: ...


class Replicas(Protocol):
    """The generators (core/launch/generators.py)."""

    def pin(self) -> str | None: ...
    def unpin(self, name: str) -> None: ...
    def has_current_weights(self, name: str) -> bool: ...


@dataclass(frozen=True)
class _Running:
    step: int
    generator: str
    call: Any


class Evaluations:
    """See the file. For each step: look(), and begin() where one is due; finish() at the end."""

    def __init__(
        self,
        rollout: Evaluator,
        generators: Replicas | None,
        *,
        report: Callable[[int, Mapping[str, float]], None],
        is_done: Callable[[Any], bool],
        meanwhile: Callable[[], None],
    ) -> None:
        """`generators`: None where the trainer waits in any case. `report(step, figures)`. `is_done`: whether a call
        has ended. `meanwhile`: is called about once a second while something is waited for."""
        self._rollout, self._generators = rollout, generators
        self._report, self._is_done, self._meanwhile = report, is_done, meanwhile
        self._running: _Running | None = None
        self._returning: set[str] = set()

    @property
    def step(self) -> int | None:
        """The step whose weights are measured now; None: there is no evaluation."""
        return None if self._running is None else self._running.step

    def begin(self, step: int) -> None:
        """Evaluate the weights of `step`, which every generator has. Return at once where one can be spared."""
        generator = None if self._generators is None else self._generators.pin()
        if generator is None:
            self._report(step, self._rollout.evaluate(step, self._meanwhile))
            return
        self._running = _Running(step, generator, self._rollout.begin_evaluation(step, generator))
        logger.info("Evaluating step %d on %s beside training", step, generator)

    def look(self) -> None:
        """File an evaluation that has ended, and return its generator to training when it has the current weights."""
        if self._running is not None and self._is_done(self._running.call):
            self.finish()
        for name in [name for name in self._returning if self._has_current_weights(name)]:
            self._returning.remove(name)
            self._rollout.release_generator(name)

    def _has_current_weights(self, name: str) -> bool:
        return self._generators is not None and self._generators.has_current_weights(name)

    def finish(self) -> None:
        """Wait for the evaluation that runs, and file it."""
        if self._running is None:
            return
        running, self._running = self._running, None
        try:
            figures = self._rollout.wait_evaluated(running.call, self._meanwhile)
        finally:
            if self._generators is not None:
                self._generators.unpin(running.generator)
                self._returning.add(running.generator)
        if figures:  # none: its generator was lost
            self._report(running.step, figures)


class SerialEvaluations:
    """Evaluations for which training always waits, with the calls of Evaluations."""

    step = None

    def __init__(self, evaluate: Callable[[int], None]) -> None:
        """`evaluate(step)`."""
        self.begin = evaluate

    def look(self) -> None:
        """Do nothing: none is under way."""

    def finish(self) -> None:
        """Do nothing, as look()."""
