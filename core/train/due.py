"""The schedule of a run, and when a periodic action is due. Reads no clock: the caller passes the time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout.experience import Schedule

if TYPE_CHECKING:
    from core.config.runtime import ExperimentSaveEvalControl

logger = logging.getLogger(__name__)


def schedule_from_control(control: ExperimentSaveEvalControl, *, num_prompts: int, batch_size: int) -> Schedule:
    """Apply the exp_ctrl keys to a data set; benchmark_steps and total_train_steps both shorten the run. Warn where the
    epochs end before."""
    schedule = Schedule(
        num_prompts=num_prompts,
        batch_size=batch_size,
        total_epochs=control.total_train_epochs,
        total_steps_limit=control.steps_limit,
    )
    if control.steps_limit is not None and schedule.total_steps < control.steps_limit:
        logger.warning(
            "The run ends after %d steps, at the end of its epochs, before its limit of %d steps; raise "
            "exp_ctrl.total_train_epochs to %d",
            schedule.total_steps, control.steps_limit, -(-control.steps_limit // schedule.steps_per_epoch),
        )  # fmt: skip
    return schedule


@dataclass(frozen=True, kw_only=True)
class Frequency:
    """Due every N epochs, steps or seconds, whichever comes first. None: never for that reason."""

    epochs: int | None
    steps: int | None
    seconds: float | None


def evaluation_frequency(control: ExperimentSaveEvalControl) -> Frequency:
    """Return when evaluations are due."""
    return Frequency(epochs=control.eval_freq_epochs, steps=control.eval_freq_steps, seconds=control.eval_freq_secs)


class DueTimer:
    """Computes when a `Frequency` is due again. Nothing is due before `first_step`, which is itself due whatever the
    frequency (None: no such step). `at_end`: the last step of a run is due, whatever the frequency; otherwise it is due
    whenever any step is."""

    def __init__(
        self, frequency: Frequency, *, now: float, first_step: int | None = None, at_end: bool = False
    ) -> None:
        self._frequency = frequency
        self._first_step = first_step
        self._at_end = at_end or frequency != Frequency(epochs=None, steps=None, seconds=None)
        self._last_seconds = now
        self._steps = 0

    def state_dict(self, *, now: float) -> dict[str, float]:
        """Return the time since it was due."""
        return {"steps": self._steps, "seconds": now - self._last_seconds}

    def load_state_dict(self, state: Mapping[str, float], *, now: float) -> None:
        """Continue counting from there."""
        self._steps, self._last_seconds = int(state["steps"]), now - state["seconds"]

    def due_after(self, step: int, schedule: Schedule, *, now: float) -> bool:
        """Call due() for a step of a schedule."""
        epoch, epoch_step = schedule.position(step)
        return self.due(
            step=step, ends_epoch=epoch_step == schedule.steps_per_epoch, epoch=epoch, now=now,
            is_last=step == schedule.total_steps,
        )  # fmt: skip

    def due(self, *, step: int, ends_epoch: bool, epoch: int, now: float, is_last: bool = False) -> bool:
        """Call once after every step (counting from 1); a true answer starts the count anew."""
        self._steps += 1
        freq = self._frequency
        if self._first_step is not None and step < self._first_step and not is_last:
            return False
        is_due = (
            step == self._first_step
            or (freq.steps is not None and self._steps >= freq.steps)
            or (freq.seconds is not None and now - self._last_seconds >= freq.seconds)
            or (freq.epochs is not None and ends_epoch and epoch % freq.epochs == 0)
            or (is_last and self._at_end)
        )
        if is_due:
            self._steps = 0
            self._last_seconds = now
        return is_due
