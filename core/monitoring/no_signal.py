"""Detects that nothing is learned: every answer has had the same reward for some steps, so no advantage is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.monitoring.samples import Sample, shortened
from rollout.data.source import printable

_STEPS = 8
"""After so many steps without signal there is a message, and again after twice as many."""


class NoSignal:
    """Counts steps in a row in which rewards say nothing about which answer is better."""

    def __init__(self) -> None:
        self._in_a_row, self._answers = 0, 0.0

    def count(self, row: Mapping[str, object]) -> None:
        """Count a step by its metrics. With a critic, answers of different prompts are compared; without, those of one
        prompt."""
        is_equal = row.get("reward/std") == 0.0 or (row.get("groups/equal") == 1.0 and bool(row.get("disable_value")))
        self._in_a_row = self._in_a_row + 1 if is_equal else 0
        number = row.get("n_seqs", 0.0)
        self._answers = (self._answers if self._in_a_row > 1 else 0.0) + (number if isinstance(number, float) else 0.0)

    @property
    def is_due(self) -> bool:
        """Whether there is a message after this step: after _STEPS, twice as many, four times as many, ..."""
        doubled, rest = divmod(self._in_a_row, _STEPS)
        return self._in_a_row > 0 and rest == 0 and doubled & (doubled - 1) == 0

    def message(self, samples: Sequence[Sample]) -> str:
        """Return one line with the first of the step's `samples`."""
        said = ""
        if samples:
            said = f"; for example {printable(shortened(samples[0].answer, 100))!r}: {samples[0].reward:g}"
        return (
            f"No signal: the {self._answers:.0f} answers of the last {self._in_a_row} steps have equal rewards within "
            f"their group, so nothing is learned{said}. Look at the answers with `slipstream samples`"
        )
