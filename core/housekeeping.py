"""What is due after a step: evaluation, saved model, recover checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.monitor import StepTimer
from core.recover import RecoverStore, RunState
from core.schedule import DueTimer, Frequency, Schedule

if TYPE_CHECKING:
    from core.config_runtime import ExperimentSaveEvalControl


@dataclass(frozen=True, kw_only=True)
class Actions:
    """What can be due, as calls into the run."""

    evaluate: Callable[[int], None] | None
    """(finished steps); None: there is nothing to evaluate on."""
    save_model: Callable[[str], None]
    """(name of the saved model's folder)"""
    save_engines: Callable[[Path], None]
    rollout_state: Callable[[], object]
    driver_state: Callable[[], tuple[float, dict[str, object]]]
    """() -> (seconds of training so far, what else a recover checkpoint must hold)"""


def _timers(control: ExperimentSaveEvalControl, now: float) -> dict[str, DueTimer]:
    evaluate = Frequency(epochs=control.eval_freq_epochs, steps=control.eval_freq_steps, seconds=control.eval_freq_secs)
    save = Frequency(epochs=control.save_freq_epochs, steps=control.save_freq_steps, seconds=control.save_freq_secs)
    ckpt = Frequency(epochs=control.ckpt_freq_epochs, steps=control.ckpt_freq_steps, seconds=control.ckpt_freq_secs)
    return {
        "eval": DueTimer(evaluate, now=now),
        "save": DueTimer(save, now=now),
        # The tutorial's rule: the first recover checkpoint follows the second step.
        "ckpt": DueTimer(ckpt, now=now, first_step=2),
    }


@dataclass(kw_only=True)
class Housekeeping:
    """Asks after every step what is due, and does it. `recover` None: no recover checkpoints are written."""

    schedule: Schedule
    control: ExperimentSaveEvalControl
    actions: Actions
    recover: RecoverStore | None
    _timers: dict[str, DueTimer] = field(init=False)

    def __post_init__(self) -> None:
        self._timers = _timers(self.control, time.monotonic())

    def after_step(self, step: int, timer: StepTimer) -> None:
        """`step` steps are finished and the generators have its weights."""
        if self.control.benchmark_steps is not None:
            return
        epoch, epoch_step = self.schedule.position(step)
        ends_epoch = epoch_step == self.schedule.steps_per_epoch
        when: dict[str, Any] = {
            "step": step,
            "ends_epoch": ends_epoch,
            "epoch": epoch,
            "now": time.monotonic(),
            "is_last": step == self.schedule.total_steps,
        }
        if self.actions.evaluate is not None and self._timers["eval"].due(**when):
            with timer("evaluate"):
                self.actions.evaluate(step)
        if self._timers["save"].due(**when):
            with timer("save"):
                self.actions.save_model(f"epoch{epoch}epochstep{epoch_step}globalstep{step}")
        if self.recover is not None and self._timers["ckpt"].due(**when):
            with timer("recover checkpoint"):
                elapsed, extra = self.actions.driver_state()
                state = RunState(step=step, version=step, elapsed_seconds=elapsed, extra=extra)
                self.recover.dump(state, self.actions.rollout_state(), self.actions.save_engines)
