"""What a run saves at its end, and when a signal ends it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from core.config.runtime import ExperimentSaveEvalControl
from core.monitoring.monitor import StepTimer
from core.processes.signals import SIGNALS, EndNow, Interrupts, raise_if_interrupted
from core.train.periodic import PeriodicActions, SerialEvaluations
from core.train.recover import RunState
from rollout.experience import Schedule


class Run:
    """A run of `steps` steps whose parts are counted; `during` is called in the middle of every step; `after`:
    the run that it continues."""

    def __init__(
        self, *, steps: int = 3, during: Callable[[int], None] = lambda step: None, interrupt_seconds: float = 60.0,
        evaluations: Any = None, recovers: bool = True, done: int = 0,
        has_model: Callable[[str], bool] = lambda name: False, after: Run | None = None, **control: Any,
    ) -> None:  # fmt: skip
        self.models: list[str] = []
        self.checkpoints: list[int] = []
        self.waits = 0
        self.trained = 0
        self._during, self._steps = during, steps
        self.state = RunState(step=done, version=done, elapsed_seconds=0.0, extra={}) if after is None else after.state
        self._done = self.state.step
        self._periodic = PeriodicActions(
            schedule=Schedule(num_prompts=steps, batch_size=1, total_epochs=1),
            control=ExperimentSaveEvalControl(**{"ckpt_freq_secs": None, **control}),
            report_step=lambda step: None, save_model=self.models.append, has_model=has_model,
            evaluations=evaluations,
            begin_save=lambda folder: lambda stop: None, rollout_state=lambda: None, driver_state=lambda: (0.0, {}),
            recover=self if recovers else None,  # type: ignore[arg-type]
            start=self.state,
            interrupt_seconds=interrupt_seconds,
        )  # fmt: skip

    def raise_if_failed(self) -> None:
        """As RecoverStore."""

    def begin(self, state: RunState, *args: object, began: float) -> None:
        self.checkpoints.append(state.step)
        self.state = state

    def wait(self) -> None:
        raise_if_interrupted()
        self.waits += 1

    def train(self, before: Callable[[int], None] = lambda step: None) -> None:
        timer = StepTimer(lambda phase: None)
        with self._periodic.saved_at_interrupt():
            for step in range(self._done + 1, self._steps + 1):
                before(step)  # waits for its batch
                with self._periodic.whole_step():
                    self._during(step)
                    raise_if_interrupted()
                    self.trained += 1
                    self._periodic.after_step(step, timer)
                    self._periodic.after_report(step, timer)


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    with Interrupts():
        yield


def at(step: int, do: Callable[[], None]) -> Callable[[int], None]:
    return lambda now: do() if now == step else None


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def name_of(step: int) -> str:
    return f"epoch1epochstep{step}globalstep{step}"


@pytest.mark.parametrize("steps", [1, 3])
def test_the_last_step_saves_model_and_checkpoint_though_no_frequency_is_set(steps: int) -> None:
    run = Run(steps=steps)
    run.train()
    assert run.models == [name_of(steps)]
    assert run.checkpoints == ([1] if steps == 1 else [2, 3])
    assert run.waits == 1, "the run waits until the checkpoint is on the disk"


@pytest.mark.parametrize(("mode", "saved"), [("always", [2, 4]), ("last", [4]), ("never", [])])
def test_models_are_saved_always_or_at_the_end_or_never(mode: str, saved: list[int]) -> None:
    run = Run(steps=4, save_freq_steps=2, save_hf_checkpoint=mode)
    run.train()
    assert run.models == [name_of(step) for step in saved]
    assert run.checkpoints[-1] == 4, "recover checkpoints are written in any case"
    run = Run(steps=9, save_hf_checkpoint=mode)
    with pytest.raises(KeyboardInterrupt):
        run.train(before=at(3, ctrl_c))
    assert run.models == ([] if mode == "never" else [name_of(2)])


@pytest.mark.parametrize(("mode", "saved"), [("always", [name_of(3)]), ("last", [name_of(3)]), ("never", [])])
def test_a_run_that_continues_from_its_last_step_saves_the_model_that_is_missing(mode: str, saved: list[str]) -> None:
    asked: list[str] = []

    def has_model(name: str) -> bool:
        asked.append(name)
        return present

    for present in (False, True):
        run = Run(steps=3, done=3, has_model=has_model, save_hf_checkpoint=mode)
        run.train()
        assert run.models == ([] if present else saved) and run.checkpoints == [] and run.waits == 1
    assert asked == ([] if mode == "never" else [name_of(3)] * 2)
    run = Run(steps=3, done=2, save_hf_checkpoint=mode)
    run.train()
    assert run.models == saved, "once, with the step"


def test_a_benchmark_saves_nothing() -> None:
    run = Run(benchmark_steps=3)
    run.train()
    assert (run.models, run.checkpoints) == ([], [])


@pytest.mark.parametrize("end", SIGNALS)
def test_a_signal_in_a_step_lets_it_finish_and_saves_it(end: int) -> None:
    run = Run(steps=9, during=at(5, lambda: os.kill(os.getpid(), end)))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert run.trained == 5
    assert run.models == [name_of(5)] and run.checkpoints == [2, 5] and run.waits == 1


@pytest.mark.parametrize(
    ("step", "options", "models", "checkpoints"),
    [
        (5, {}, [4], [2, 4]),
        (5, {"save_freq_steps": 1, "ckpt_freq_steps": 1}, [1, 2, 3, 4], [2, 3, 4]),
        (5, {"recovers": False}, [4], []),
        (1, {}, [], []),
    ],
    ids=["at once", "nothing twice", "without recover checkpoints", "before the first step has finished"],
)
def test_a_signal_while_a_batch_is_waited_for_saves_the_last_step(step, options, models, checkpoints) -> None:
    run = Run(steps=9, **options)
    with pytest.raises(KeyboardInterrupt):
        run.train(before=at(step, ctrl_c))
    assert run.trained == step - 1
    assert run.models == [name_of(one) for one in models] and run.checkpoints == checkpoints


def test_a_step_that_does_not_finish_in_time_is_not_saved(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(steps=9, during=at(5, ctrl_c), interrupt_seconds=0.0)
    with pytest.raises(EndNow):
        run.train()
    assert run.trained == 4 and run.models == [] and run.checkpoints == [2]
    assert "Step 5 was not finished" in caplog.text


def test_a_second_signal_ends_a_step_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.processes.signals._SAME_SECONDS", -1.0)

    def twice() -> None:
        ctrl_c()
        ctrl_c()
        raise AssertionError("the second signal ends this")

    run = Run(steps=9, during=at(5, twice))
    with pytest.raises(EndNow):
        run.train()
    assert run.models == []


def test_signals_that_come_together_are_one() -> None:
    """As from `timeout`, which sends one to the command and one to its process group."""

    def twice() -> None:
        ctrl_c()
        ctrl_c()

    run = Run(steps=9, during=at(5, twice))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert run.models == [name_of(5)]


def test_a_signal_ends_an_evaluation_and_saves_the_step(caplog: pytest.LogCaptureFixture) -> None:
    evaluated: list[int] = []

    def evaluate(step: int) -> None:
        if step == 4:
            ctrl_c()
        evaluated.append(step)

    run = Run(steps=9, evaluations=SerialEvaluations(evaluate), eval_freq_steps=2)
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        run.train()
    assert evaluated == [2] and run.models == [name_of(4)] and run.checkpoints == [2, 4]
    assert "The evaluation of step 4 was interrupted" in caplog.text
    Run(steps=6, evaluations=SerialEvaluations(evaluated.append), eval_freq_steps=9, after=run).train()
    assert evaluated == [2, 5, 6]


def test_a_run_that_continues_makes_up_for_the_evaluation_that_a_signal_left_under_way() -> None:
    class Beside:
        """Evaluations of which none ends before the last step."""

        step: int | None = None

        def begin(self, step: int) -> None:
            self.step = step

        def look(self) -> None: ...
        def finish(self) -> None: ...

    run, evaluated = Run(steps=9, evaluations=Beside(), during=at(6, ctrl_c), eval_freq_steps=4), list[int]()
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        run.train()
    Run(steps=9, evaluations=SerialEvaluations(evaluated.append), eval_freq_steps=4, after=run).train()
    assert run.checkpoints[-1] == 6 and evaluated == [7, 8, 9]
