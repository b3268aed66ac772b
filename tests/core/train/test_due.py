"""Steps, epochs and what is due when."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from core.config.runtime import ExperimentSaveEvalControl
from core.experiments.context import Start, check_ends_later, fit_to_schedule, rows_that_stay
from core.monitoring.monitor import StepTimer
from core.runs.checkpoints import RunIdentity
from core.train.periodic import DueTimer, Frequency, PeriodicActions, SerialEvaluations, schedule_from_control
from core.train.recover import RunState
from rollout.experience import Schedule

NEVER = Frequency(epochs=None, steps=None, seconds=None)


def due_steps(timer: DueTimer, steps: int, *, seconds_per_step: float, steps_per_epoch: int = 1000) -> list[int]:
    found = []
    for step in range(1, steps + 1):
        epoch, epoch_step = divmod(step - 1, steps_per_epoch)
        ends = epoch_step + 1 == steps_per_epoch
        if timer.due(step=step, ends_epoch=ends, epoch=epoch + 1, now=step * seconds_per_step):
            found.append(step)
    return found


def test_an_epoch_has_a_smaller_last_batch_and_positions_count_from_one() -> None:
    schedule = Schedule(num_prompts=10, batch_size=4, total_epochs=2)
    assert (schedule.steps_per_epoch, schedule.total_steps) == (3, 6)
    assert [schedule.position(s) for s in (1, 3, 4, 6)] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert Schedule(num_prompts=10, batch_size=4, total_epochs=2, total_steps_limit=5).total_steps == 5


@pytest.mark.parametrize(("num_prompts", "batch_size"), [(10, 4), (12, 5), (7, 7), (5, 8), (9, 1)])
def test_a_number_of_prompts_is_the_step_that_skips_none_of_them(num_prompts: int, batch_size: int) -> None:
    """As after a change of the batch size: what is left over of a batch is trained once more."""
    schedule = Schedule(num_prompts=num_prompts, batch_size=batch_size, total_epochs=3)
    consumed = [schedule.consumed_before(step) for step in range(schedule.total_steps + 1)]
    for trained in range(2 * num_prompts + 1):
        assert schedule.step_of(trained) == max(step for step, n in enumerate(consumed) if n <= trained)


@pytest.mark.parametrize(
    ("total", "benchmark", "steps"), [(5, 3, 3), (3, 5, 3), (5, None, 5), (None, 5, 5), (None, None, 8), (9, 9, 8)]
)
def test_the_shortest_of_all_limits_ends_the_run(total: int | None, benchmark: int | None, steps: int) -> None:
    control = ExperimentSaveEvalControl(total_train_epochs=2, total_train_steps=total, benchmark_steps=benchmark)
    assert schedule_from_control(control, num_prompts=16, batch_size=4).total_steps == steps


def test_epochs_that_end_before_the_steps_asked_for_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    schedule_from_control(ExperimentSaveEvalControl(total_train_steps=4), num_prompts=16, batch_size=4)
    assert not caplog.records
    schedule_from_control(ExperimentSaveEvalControl(total_train_steps=9), num_prompts=16, batch_size=4)
    assert "ends after 4 steps" in caplog.text and "raise exp_ctrl.total_train_epochs to 3" in caplog.text


def test_the_recover_rule_of_the_tutorial_first_after_step_two_then_by_seconds() -> None:
    timer = DueTimer(Frequency(epochs=None, steps=None, seconds=600), now=0.0, first_step=2)
    assert due_steps(timer, 12, seconds_per_step=250) == [2, 5, 8, 11]
    every_step = DueTimer(Frequency(epochs=None, steps=1, seconds=None), now=0.0, first_step=2)
    assert due_steps(every_step, 4, seconds_per_step=1) == [2, 3, 4]


def test_steps_and_epochs_are_counted_separately() -> None:
    by_step = DueTimer(Frequency(epochs=None, steps=3, seconds=None), now=0.0)
    assert due_steps(by_step, 10, seconds_per_step=1) == [3, 6, 9]
    by_epoch = DueTimer(Frequency(epochs=2, steps=None, seconds=None), now=0.0)
    assert due_steps(by_epoch, 13, seconds_per_step=1, steps_per_epoch=3) == [6, 12]
    assert due_steps(DueTimer(NEVER, now=0.0), 10, seconds_per_step=1e9) == []


def test_the_last_step_is_due_whenever_any_is_and_always_where_the_end_is() -> None:
    last = {"step": 1, "ends_epoch": False, "epoch": 1, "now": 7.0, "is_last": True}
    assert DueTimer(Frequency(epochs=1, steps=None, seconds=None), now=0.0).due(**last)
    assert not DueTimer(NEVER, now=0.0).due(**last)
    assert DueTimer(NEVER, now=0.0, first_step=2, at_end=True).due(**last)
    assert not DueTimer(NEVER, now=0.0, at_end=True).due(**{**last, "is_last": False})


def test_a_run_keeps_the_rows_up_to_its_checkpoint_and_none_where_it_begins_anew(tmp_path: Path) -> None:
    def kept(step: int, checkpoint: Path | None) -> int:
        state = RunState(step=step, version=step, elapsed_seconds=0.0, extra={})
        return rows_that_stay(Start(state=state, rollout_state=None, checkpoint=checkpoint))

    assert kept(5, tmp_path) == 5
    assert kept(0, None) == -1, "not even those of the evaluation before the first step"


class Store:
    """Keeps the state of the last recover checkpoint; `error` is that of a write that has failed since."""

    state = RunState(step=0, version=0, elapsed_seconds=0.0, extra={})
    error: OSError | None = None

    def raise_if_failed(self) -> None:
        if self.error is not None:
            raise self.error

    def begin(self, state: RunState, *args: object, began: float) -> None:
        self.state = RunState(**json.loads(json.dumps(asdict(state))))


def make_periodic(
    store: Store, *, evaluated: list[int] | None = None, saved: list[str] | None = None
) -> PeriodicActions:
    return PeriodicActions(
        schedule=Schedule(num_prompts=1000, batch_size=1, total_epochs=1),
        control=ExperimentSaveEvalControl(
            eval_freq_steps=3, save_freq_steps=4, save_freq_epochs=None, ckpt_freq_steps=3
        ),
        report_step=lambda step: None,
        evaluations=SerialEvaluations(([] if evaluated is None else evaluated).append),
        save_model=([] if saved is None else saved).append,
        has_model=lambda name: True,
        begin_save=lambda folder: lambda stop: None,
        rollout_state=lambda: None,
        driver_state=lambda: (0.0, {"value_norm": {}}),
        recover=store,  # type: ignore[arg-type]
        start=store.state,
    )


def test_a_run_that_goes_on_from_a_checkpoint_evaluates_and_saves_when_it_would_have() -> None:
    store, timer = Store(), StepTimer(lambda phase: None)
    evaluated: list[int] = []
    saved: list[str] = []
    for last in (6, 10):  # the second run begins at step 5
        periodic = make_periodic(store, evaluated=evaluated, saved=saved)
        for step in range(store.state.step + 1, last + 1):
            periodic.after_step(step, timer)
            periodic.after_report(step, timer)
    assert evaluated == [3, 6, 6, 9]
    assert [name.partition("global")[2] for name in saved] == ["step4", "step8"]
    assert store.state.step == 8 and store.state.extra["value_norm"] == {}


def test_a_checkpoint_that_failed_ends_the_run_after_the_next_step_though_none_is_due() -> None:
    store, timer = Store(), StepTimer(lambda phase: None)
    periodic = make_periodic(store)
    for step in (1, 2):
        periodic.after_report(step, timer)
    assert store.state.step == 2
    store.error = OSError("No space left on device")
    with pytest.raises(OSError, match="No space left"):
        periodic.after_report(3, timer)
    assert store.state.step == 2


def test_seconds_since_something_was_due_count_on() -> None:
    frequency = Frequency(epochs=None, steps=None, seconds=600)
    before = DueTimer(frequency, now=0.0)
    assert due_steps(before, 3, seconds_per_step=250) == [3]
    after = DueTimer(frequency, now=5000.0)
    after.load_state_dict(before.state_dict(now=1000.0), now=5000.0)  # 250 s after it was due
    asked = {"ends_epoch": False, "epoch": 1}
    assert not after.due(step=4, now=5349.0, **asked) and after.due(step=5, now=5350.0, **asked)


def test_another_batch_size_continues_after_the_same_prompts_also_where_the_run_is_shorter_now() -> None:
    identity = RunIdentity(train_bs_n_seqs=4, group_size=1, n_nodes=1)
    found = RunState(step=20, version=20, elapsed_seconds=0.0, extra={})
    start = Start(state=found, rollout_state=None, checkpoint=None, identity=identity, changes=("batch size",))
    schedule = Schedule(num_prompts=1000, batch_size=8, total_epochs=1, total_steps_limit=12)
    state = fit_to_schedule(start, schedule).state
    assert (state.step, state.version) == (10, 10)


@pytest.mark.parametrize(
    ("epochs", "limit", "message"),
    [
        (1, 12, None),
        (1, 13, None),
        (1, 11, r"^exp_ctrl\.total_train_steps: 11 must be at least 12, .* \(recover/globalstep12\)\. Set it to 12 to"),
        (2, None, r"^exp_ctrl\.total_train_epochs: 2 epochs of 5 steps must be at least 12, .*\. Raise it; or start"),
        (2, 11, r"^exp_ctrl\.total_train_epochs: 2 epochs of 5 steps "),
    ],
)
def test_a_run_does_not_end_before_the_step_that_it_continues_from(epochs, limit, message) -> None:
    state = RunState(step=12, version=12, elapsed_seconds=0.0, extra={})
    start = Start(state=state, rollout_state=None, checkpoint=Path("recover/globalstep12"))
    num_prompts = 5 if message and "epochs" in message else 100
    schedule = Schedule(num_prompts=num_prompts, batch_size=1, total_epochs=epochs, total_steps_limit=limit)
    if message is None:
        check_ends_later(start, schedule)
        return
    with pytest.raises(ValueError, match=message):
        check_ends_later(start, schedule)
