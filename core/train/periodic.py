"""What is due after a step: evaluation, saved model, recover checkpoint; the last two also when a signal ends the run.

Invariant: a recover checkpoint is begun when all records of its step have been written, so that a run that continues
from it neither repeats nor misses a row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from core.monitoring.monitor import StepTimer
from core.processes.signals import EndNow, interruptible, postponed
from core.recovery.recover import RecoverStore, RunState, WaitWritten
from core.train.due import DueTimer, Frequency, evaluation_frequency
from core.train.evaluations import Evaluations, SerialEvaluations
from rollout.experience import Schedule

if TYPE_CHECKING:
    from core.config.runtime import ExperimentSaveEvalControl

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Actions:
    """What can be due, as calls into the run."""

    report_step: Callable[[int], None]
    """(finished steps); always due: reports the progress to the process that supervises the run"""
    evaluations: Evaluations | SerialEvaluations | None
    """None: there is nothing to evaluate on."""
    save_model: Callable[[str], None]
    """(name of the saved model's folder)"""
    has_model: Callable[[str], bool]
    """(name of the saved model's folder)"""
    begin_save: Callable[[Path], WaitWritten]
    """(folder of the recover checkpoint)"""
    rollout_state: Callable[[], object]
    driver_state: Callable[[], tuple[float, dict[str, object]]]
    """() -> (seconds of training so far, what else a recover checkpoint must hold)"""


def _timers(control: ExperimentSaveEvalControl, now: float) -> dict[str, DueTimer]:
    save = Frequency(epochs=control.save_freq_epochs, steps=control.save_freq_steps, seconds=control.save_freq_secs)
    ckpt = Frequency(epochs=control.ckpt_freq_epochs, steps=control.ckpt_freq_steps, seconds=control.ckpt_freq_secs)
    return {
        "eval": DueTimer(evaluation_frequency(control), now=now),
        "save": DueTimer(save, now=now, at_end=True),
        # The tutorial's rule: the first recover checkpoint follows the second step.
        "ckpt": DueTimer(ckpt, now=now, first_step=2, at_end=True),
    }


@dataclass(kw_only=True)
class PeriodicActions:
    """Runs after every step what is due. `recover` None: no recover checkpoints are written. `start`: where the run
    begins; the count continues from what was due last before that checkpoint. `interrupt_seconds`: that a signal leaves
    to finish a step, and to save."""

    schedule: Schedule
    control: ExperimentSaveEvalControl
    actions: Actions
    recover: RecoverStore | None
    start: RunState
    interrupt_seconds: float = 30.0
    _timers: dict[str, DueTimer] = field(init=False)
    _last: dict[str, int] = field(init=False)
    """Step of the last one, by kind."""
    _waits: dict[str, bool] = field(init=False)
    """What is due and has to wait, by kind."""
    _finished: int = field(init=False)
    """Steps whose records are all written."""

    def __post_init__(self) -> None:
        now = time.monotonic()
        self._timers = _timers(self.control, now)
        for name, state in self.start.extra.get("timers", {}).items():  # type: ignore[attr-defined]
            self._timers[name].load_state_dict(state, now=now)
        self._finished = self.start.step
        self._waits = {"eval": False, "ckpt": False, **self.start.extra.get("waits", {})}  # type: ignore[dict-item]
        self._last = {"save": self.start.step, "ckpt": self.start.step}

    @contextmanager
    def saved_at_interrupt(self) -> Iterator[None]:
        """Save checkpoint and model of the last finished step when a signal ends the block, then raise it again. At
        the end of a run that had no step left to train, save the model of its last step if there is none."""
        try:
            yield
        except EndNow as end:
            logger.error("Step %d was not finished (%s): nothing more is saved.", self._finished + 1, end)
            raise
        except KeyboardInterrupt:
            with postponed(self.interrupt_seconds):
                self._save_now()
            raise
        if self.recover is not None:
            with postponed(self.interrupt_seconds):
                if self.start.step == self.schedule.total_steps:
                    self._save_missing_model()
                self.recover.wait()

    def whole_step(self) -> AbstractContextManager[None]:
        """Return a block that a signal leaves time to finish: what changes the weights, to the end of the step."""
        return postponed(self.interrupt_seconds)

    def after_step(self, step: int, timer: StepTimer) -> None:
        """Evaluate and save the model when due; `step` steps are finished and the generators have its weights."""
        self.actions.report_step(step)
        if self.control.benchmark_steps is not None:
            return
        if self.actions.evaluations is not None:
            self._evaluate_if_due(self.actions.evaluations, step, timer)
        saves = self.control.save_hf_checkpoint
        if self._is_due("save", step) and (
            saves == "always" or (saves == "last" and step == self.schedule.total_steps)
        ):
            with timer("save"):
                self._save_model(step)

    def after_report(self, step: int, timer: StepTimer) -> None:
        """Begin a recover checkpoint when due; the step's metrics are written. Raises the error of the last one, if it
        failed."""
        self._finished = step
        if self.control.benchmark_steps is not None or self.recover is None:
            return
        self.recover.raise_if_failed()
        self._waits["ckpt"] |= self._is_due("ckpt", step)
        if self._waits["ckpt"] and self._can_repeat_evaluation(step):
            self._waits["ckpt"] = False
            with timer("recover checkpoint"):
                self._checkpoint(self.recover, step)

    def _evaluate_if_due(self, evaluations: Evaluations | SerialEvaluations, step: int, timer: StepTimer) -> None:
        """Evaluate when due; where another evaluation or a recover checkpoint has to end first, after that."""
        is_last = step == self.schedule.total_steps
        evaluations.look()
        self._waits["eval"] |= self._is_due("eval", step)
        if is_last and evaluations.step is not None:
            with timer("evaluate"):
                evaluations.finish()
        is_busy = evaluations.step is not None or self._waits["ckpt"]
        if self._waits["eval"] and (is_last or not is_busy):
            with timer("evaluate"):
                self._evaluate(evaluations.begin, step)
                if is_last:
                    evaluations.finish()

    def _can_repeat_evaluation(self, step: int) -> bool:
        """Return whether a run that continues from a checkpoint of `step` has the weights again that are evaluated."""
        evaluations = self.actions.evaluations
        return evaluations is None or evaluations.step in (None, step) or step == self.schedule.total_steps

    def _evaluate(self, evaluate: Callable[[int], None], step: int) -> None:
        """Evaluate, unless a signal comes: the run that continues evaluates after its first step then."""
        try:
            with interruptible():
                evaluate(step)
            self._waits["eval"] = False
        except EndNow:
            raise
        except KeyboardInterrupt:
            logger.warning("The evaluation of step %d was interrupted.", step)

    def _save_missing_model(self) -> None:
        step = self.start.step
        if self.control.save_hf_checkpoint != "never" and not self.actions.has_model(self._model_name(step)):
            self._save_model(step)

    def _save_model(self, step: int) -> None:
        self.actions.save_model(self._model_name(step))
        self._last["save"] = step

    def _model_name(self, step: int) -> str:
        epoch, epoch_step = self.schedule.position(step)
        return f"epoch{epoch}epochstep{epoch_step}globalstep{step}"

    def _checkpoint(self, recover: RecoverStore, step: int) -> None:
        began = time.perf_counter()
        elapsed, extra = self.actions.driver_state()
        now = time.monotonic()
        timers = {name: due.state_dict(now=now) for name, due in self._timers.items()}
        extra = extra | {"timers": timers, "waits": dict(self._waits)}
        state = RunState(step=step, version=step, elapsed_seconds=elapsed, extra=extra)
        recover.begin(state, self.actions.rollout_state, self.actions.begin_save, began=began)
        self._last["ckpt"] = step

    def _save_now(self) -> None:
        """Save what the last finished step has not saved: the checkpoint is written beside the model."""
        step = self._finished
        if self.control.benchmark_steps is not None:
            return
        if self.recover is not None and self._last["ckpt"] < step:
            self._waits["eval"] |= not self._can_repeat_evaluation(step)
            self._checkpoint(self.recover, step)
        if self._last["save"] < step and self.control.save_hf_checkpoint != "never":
            self._save_model(step)
        if self.recover is not None:
            self.recover.wait()

    def _is_due(self, what: str, step: int) -> bool:
        return self._timers[what].due_after(step, self.schedule, now=time.monotonic())
