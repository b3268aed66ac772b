"""A tracker that is slow or fails neither delays nor ends a run."""

import logging
import threading
from collections.abc import Mapping, Sequence

import pytest

from core.monitoring import trackers
from core.monitoring.monitor import SampleSink
from core.monitoring.samples import Sample
from core.monitoring.trackers import BackgroundTracker


class Service:
    """Takes rows as soon as it is open; refuses those of `bad` steps."""

    name = "The service"

    def __init__(self, *, bad: Sequence[int] = (), is_open: bool = True) -> None:
        self.taken: list[object] = []
        self.bad, self.open = bad, threading.Event()
        if is_open:
            self.open.set()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.open.wait()
        if step in self.bad:
            raise ConnectionError(f"no route for {step}")
        self.taken.append((step, dict(metrics)))

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self.taken.append((step, list(samples)))

    def close(self) -> None:
        self.taken.append("closed")


def test_rows_arrive_in_order_and_are_there_when_it_is_closed() -> None:
    service = Service()
    tracker = BackgroundTracker(service)
    metrics = {"loss": 1.0}
    tracker.write(1, metrics)
    metrics["loss"] = 2.0
    tracker.write_samples(1, [])
    tracker.write(2, metrics)
    tracker.close()
    tracker.close()
    assert service.taken == [(1, {"loss": 1.0}), (1, []), (2, {"loss": 2.0}), "closed"]
    assert isinstance(tracker, SampleSink)


def test_a_row_that_is_refused_is_logged_once_and_later_rows_are_sent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    service = Service(bad=(2, 3))
    tracker = BackgroundTracker(service)
    for step in range(1, 5):
        tracker.write(step, {})
    tracker.close()
    assert service.taken == [(1, {}), (4, {}), "closed"]
    assert [record.getMessage() for record in caplog.records] == [
        "The service did not take a row (ConnectionError: no route for 2); training continues.",
        "The service takes rows again.",
        "The service: 2 rows are missing there; metrics.jsonl has them.",
    ]


def test_a_service_that_hangs_delays_nothing_and_its_rows_are_counted(caplog, monkeypatch) -> None:
    monkeypatch.setattr(trackers, "_MOST_WAITING", 3)
    service = Service(is_open=False)
    tracker = BackgroundTracker(service, close_seconds=0.01)
    for step in range(10):
        tracker.write(step, {})
    tracker.close()  # returns: neither is the queue emptied nor the service closed
    assert service.taken == []
    assert "did not take a row (it does not keep up); training continues." in caplog.text
    assert "is abandoned." in caplog.text
    service.open.set()
