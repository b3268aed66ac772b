"""What the monitor reports of time: phases, steps, and what is left."""

import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from core.monitoring import monitor as monitoring
from core.monitoring.metrics import Histogram, split_memory
from core.monitoring.monitor import Monitor, StepTimer, TensorBoardSink
from core.monitoring.screen import Screen
from rollout.experience.selection import Schedule


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(monitoring, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    return now


def test_a_phase_that_runs_twice_in_a_step_reports_the_sum_and_the_next_step_begins_at_nothing(clock) -> None:
    told: list[str] = []
    timer = StepTimer(told.append)
    for seconds in (2.0, 3.0):
        with timer("push"):
            clock.seconds += seconds
    clock.seconds += 1.0
    with pytest.raises(ZeroDivisionError), timer("update"):
        clock.seconds += 4.0
        _ = 1 / 0
    assert timer.finish() == (10.0, {"push": 5.0, "update": 4.0})
    assert told == ["push", "push", "update"]
    with timer("push"):
        clock.seconds += 0.5
    assert timer.finish() == (0.5, {"push": 0.5})


def test_the_remaining_time_is_that_of_the_steps_that_are_left(caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(
        screen=Screen(Console(quiet=True), compact=False),
        sinks=[],
        consumed=None,
        schedule=Schedule(num_prompts=10, batch_size=1, total_epochs=1),
        done_steps=4,
        elapsed=50.0,
    )
    with caplog.at_level(logging.INFO):
        for step, seconds in ((5, 5.0), (6, 1.0), (7, 3.0), (8, 7.0)):
            monitor.step(
                step=step, mean_batch_tokens=8.0, seconds=seconds, phases={"update": 1.0}, metrics={}, headline="",
            )  # fmt: skip
    finished = [record.getMessage() for record in caplog.records if "finishes" in record.getMessage()]
    # The first two steps of an attempt are warm-up. Then its steps took 3 s each, and 4 s: 3 and 2 of them are left.
    assert finished[0].endswith("Total time consumption: 55.000s.")
    assert finished[1].endswith("Total time consumption: 56.000s.")
    assert finished[2].endswith("Total time consumption: 59.000s. Estimated remaining time: 9.000s.")
    assert finished[3].endswith("Total time consumption: 66.000s. Estimated remaining time: 8.000s.")
    assert monitor.elapsed_seconds == 66.0


def test_tensorboard_has_a_bin_for_every_age(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path, continue_after=-1)
    sink.write(3, {"loss": 0.5, "staleness/ages": Histogram(np.array([0, 0, 2]))})
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [e.value for e in events.Scalars("loss")] == [0.5]
    (event,) = events.Histograms("staleness/ages")
    bars = dict(zip(event.histogram_value.bucket_limit, event.histogram_value.bucket, strict=True))
    assert event.step == 3 and {limit: count for limit, count in bars.items() if count} == {0.5: 2, 2.5: 1}


def test_the_memory_of_ranks_is_that_of_the_largest(tmp_path: Path) -> None:
    ranks = [{"loss": 1.0, "memory/trainer_gib": 3.0}, {"loss": 1.0, "memory/trainer_gib": 2.0}]
    assert split_memory(ranks) == ({"loss": 1.0}, {"memory/trainer_gib": 3.0})


def test_a_recovered_run_continues_its_tensorboard_curves_after_the_step_of_the_checkpoint(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for continue_after, steps in ((-1, range(6)), (3, range(4, 6))):
        sink = TensorBoardSink(tmp_path, continue_after=continue_after)
        for step in steps:
            sink.write(step, {"loss": 10.0 * (continue_after > 0) + step})
        sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 14.0), (5, 15.0),
    ]  # fmt: skip
