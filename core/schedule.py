"""Where a run stands: epochs, steps, and when something is due. No clocks of its own; the caller says the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.config.runtime import ExperimentSaveEvalControl


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps of a run. An epoch visits every prompt once; its last batch may be smaller."""

    num_prompts: int
    batch_size: int
    total_epochs: int
    total_steps_limit: int | None = None

    @classmethod
    def from_control(cls, control: ExperimentSaveEvalControl, *, num_prompts: int, batch_size: int) -> Schedule:
        """The exp_ctrl keys over a data set; benchmark_steps and total_train_steps both shorten the run."""
        limits = [n for n in (control.total_train_steps, control.benchmark_steps) if n is not None]
        return cls(
            num_prompts=num_prompts,
            batch_size=batch_size,
            total_epochs=control.total_train_epochs,
            total_steps_limit=min(limits, default=None),
        )

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_prompts // self.batch_size)

    @property
    def total_steps(self) -> int:
        steps = self.steps_per_epoch * self.total_epochs
        return steps if self.total_steps_limit is None else min(steps, self.total_steps_limit)

    def consumed_before(self, step: int) -> int:
        """Prompts that the first `step` steps train on."""
        epochs, within = divmod(step, self.steps_per_epoch)
        return epochs * self.num_prompts + min(within * self.batch_size, self.num_prompts)

    def step_at(self, num_prompts: int) -> int:
        """The most steps that train on no more than so many prompts."""
        epochs, within = divmod(num_prompts, self.num_prompts)
        return epochs * self.steps_per_epoch + within // self.batch_size

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, step of the epoch) of global step `step`; all three count from 1."""
        epoch, epoch_step = divmod(step - 1, self.steps_per_epoch)
        return epoch + 1, epoch_step + 1


@dataclass(frozen=True, kw_only=True)
class Frequency:
    """Due every so many epochs, steps or seconds, whichever comes first. None: never for that reason."""

    epochs: int | None
    steps: int | None
    seconds: float | None


class DueTimer:
    """Says when a `Frequency` is due again. Nothing is due before `first_step`, which is
    itself due whatever the frequency says (None: no such step)."""

    def __init__(self, frequency: Frequency, *, now: float, first_step: int | None = None) -> None:
        self._frequency = frequency
        self._first_step = first_step
        self._last_seconds = now
        self._steps = 0

    def state_dict(self, *, now: float) -> dict[str, float]:
        """How long ago it was due."""
        return {"steps": self._steps, "seconds": now - self._last_seconds}

    def load_state_dict(self, state: Mapping[str, float], *, now: float) -> None:
        """Go on counting from there."""
        self._steps, self._last_seconds = int(state["steps"]), now - state["seconds"]

    def due(self, *, step: int, ends_epoch: bool, epoch: int, now: float, is_last: bool = False) -> bool:
        """Ask once after every step (counting from 1); a true answer starts the count anew. The last step of a run is
        due whenever any is."""
        self._steps += 1
        freq = self._frequency
        if self._first_step is not None and step < self._first_step:
            return False
        is_due = (
            step == self._first_step
            or (freq.steps is not None and self._steps >= freq.steps)
            or (freq.seconds is not None and now - self._last_seconds >= freq.seconds)
            or (freq.epochs is not None and ends_epoch and epoch % freq.epochs == 0)
            or (is_last and freq != Frequency(epochs=None, steps=None, seconds=None))
        )
        if is_due:
            self._steps = 0
            self._last_seconds = now
        return is_due
