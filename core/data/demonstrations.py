"""Demonstrations (expert data) beside the rollouts of each step: rows as of sft, whole batches of them.

Invariant: the demonstrations of a step are a function of (rows, seed, step) alone, so that a recovered run continues
with the same ones. An epoch leaves out the rows beyond its last whole batch.
"""

from __future__ import annotations

from typing import Any

from core.data.answers import AnswerDataset
from mcore_adapter.data.batch import PackedBatch
from rollout.data.rows import DatasetError


class Demonstrations:
    """A batch of `per_step` rows for every step."""

    def __init__(self, rows: AnswerDataset, per_step: int) -> None:
        """Raises DatasetError where there are fewer rows than a step needs."""
        if len(rows) < per_step:
            raise DatasetError(
                f"demonstrations.path has {len(rows)} rows, and a step takes {per_step}: add rows, or lower "
                "demonstrations.share"
            )
        self._rows, self._per_step = rows, per_step

    def of_step(self, step: int) -> PackedBatch:
        """Return the demonstrations of a step, counted from 0."""
        epoch, within = divmod(step, len(self._rows) // self._per_step)
        return self._rows.batch(epoch + 1, within + 1, self._per_step)

    def state_dict(self) -> dict[str, int]:
        """Return what identifies the rows and their order."""
        return {**self._rows.state_dict(), "per_step": self._per_step}

    def check_continues(self, state: Any) -> None:
        """Raise DatasetError unless the run that wrote `state` visits the same rows in the same order."""
        self._rows.check_continues(state)
        if state["per_step"] != self._per_step:
            raise DatasetError(
                f"the checkpoint has {state['per_step']} demonstrations a step, this run {self._per_step}: restore "
                "demonstrations.share, or allow the change with recover_ignore_changes=true"
            )
