"""Steps, epochs and what is due when."""

from core.schedule import DueTimer, Frequency, Schedule

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


def test_the_recover_rule_of_the_tutorial_first_after_step_two_then_by_seconds() -> None:
    timer = DueTimer(Frequency(epochs=None, steps=None, seconds=600), now=0.0, first_step=2)
    assert due_steps(timer, 12, seconds_per_step=250) == [2, 5, 8, 11]
    every_step = DueTimer(Frequency(epochs=None, steps=1, seconds=None), now=0.0, first_step=2)
    assert due_steps(every_step, 4, seconds_per_step=1) == [2, 3, 4]


def test_steps_and_epochs_are_counted_separately() -> None:
    assert due_steps(DueTimer(Frequency(epochs=None, steps=3, seconds=None), now=0.0), 10, seconds_per_step=1) == [
        3,
        6,
        9,
    ]
    by_epoch = DueTimer(Frequency(epochs=2, steps=None, seconds=None), now=0.0)
    assert due_steps(by_epoch, 13, seconds_per_step=1, steps_per_epoch=3) == [6, 12]
    assert due_steps(DueTimer(NEVER, now=0.0), 10, seconds_per_step=1e9) == []


def test_the_last_step_is_due_whenever_any_is() -> None:
    last = {"step": 7, "ends_epoch": False, "epoch": 1, "now": 7.0, "is_last": True}
    assert DueTimer(Frequency(epochs=1, steps=None, seconds=None), now=0.0).due(**last)
    assert not DueTimer(NEVER, now=0.0).due(**last)
