"""What is due after a step: evaluation, saved model, recover checkpoint; the last two also when a signal ends the run.

An evaluation runs on a generator that keeps its weights, while the others sample and the trainer trains; without a
generator to spare, the trainer waits. Figures are filed under the step whose weights were measured. One evaluation runs
at a time; one that becomes due meanwhile measures the first weights after it. Invariant: a recover checkpoint is begun
when all records of its step have been written, so that a run that continues from it neither repeats nor misses a row.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from core.config.runtime import ExperimentSaveEvalControl
from core.data.stored_batch import Ref
from core.monitoring.monitor import StepTimer
from core.processes.signals import EndNow, interruptible, postponed
from core.train.recover import RecoverStore, RunState, WaitWritten
from rollout.experience import Schedule

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


class Frequency(NamedTuple):
    """Due every N epochs, steps or seconds, whichever comes first. None: never for that reason."""

    epochs: int | None
    steps: int | None
    seconds: float | None


class DueTimer:
    """Computes when a `Frequency` is due again. Nothing is due before `first_step`, which is itself due whatever the
    frequency (None: no such step). `at_end`: the last step of a run is due, whatever the frequency; otherwise it is due
    whenever any step is."""

    def __init__(
        self, frequency: Frequency, *, now: float, first_step: int | None = None, at_end: bool = False
    ) -> None:
        self._frequency = frequency
        self._first_step = first_step
        self._at_end = at_end or any(frequency)
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


class Evaluator(Protocol):
    """The rollout process (core/launch/rollout_client.py)."""

    def evaluate(self, step: int, meanwhile: Callable[[], None]) -> dict[str, float]: ...
    def begin_evaluation(self, step: int, on: str) -> Ref: ...
    def wait_evaluated(self, call: Ref, meanwhile: Callable[[], None]) -> dict[str, float]: ...
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
    call: Ref


class Evaluations:
    """See the file. For each step: look(), and begin() where one is due; finish() at the end."""

    def __init__(
        self,
        rollout: Evaluator,
        generators: Replicas | None,
        *,
        report: Callable[[int, Mapping[str, float]], None],
        is_done: Callable[[Ref], bool],
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
        for name in sorted(self._returning):
            if self._generators is not None and self._generators.has_current_weights(name):
                self._returning.remove(name)
                self._rollout.release_generator(name)

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


def _timers(control: ExperimentSaveEvalControl, now: float) -> dict[str, DueTimer]:
    save = Frequency(epochs=control.save_freq_epochs, steps=control.save_freq_steps, seconds=control.save_freq_secs)
    ckpt = Frequency(epochs=control.ckpt_freq_epochs, steps=control.ckpt_freq_steps, seconds=control.ckpt_freq_secs)
    return {
        "eval": DueTimer(Frequency(*control.eval_frequency), now=now),
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
        self.report_step(step)
        if self.control.is_benchmark:
            return
        if self.evaluations is not None:
            self._evaluate_if_due(self.evaluations, step, timer)
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
        if self.control.is_benchmark or self.recover is None:
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
        evaluations = self.evaluations
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
        if self.control.save_hf_checkpoint != "never" and not self.has_model(self._model_name(step)):
            self._save_model(step)

    def _save_model(self, step: int) -> None:
        self.save_model(self._model_name(step))
        self._last["save"] = step

    def _model_name(self, step: int) -> str:
        epoch, epoch_step = self.schedule.position(step)
        return f"epoch{epoch}epochstep{epoch_step}globalstep{step}"

    def _checkpoint(self, recover: RecoverStore, step: int) -> None:
        began = time.perf_counter()
        elapsed, extra = self.driver_state()
        now = time.monotonic()
        timers = {name: due.state_dict(now=now) for name, due in self._timers.items()}
        extra = extra | {"timers": timers, "waits": dict(self._waits)}
        state = RunState(step=step, version=step, elapsed_seconds=elapsed, extra=extra)
        recover.begin(state, self.rollout_state, self.begin_save, began=began)
        self._last["ckpt"] = step

    def _save_now(self) -> None:
        """Save what the last finished step has not saved: the checkpoint is written beside the model."""
        step = self._finished
        if self.control.is_benchmark:
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
