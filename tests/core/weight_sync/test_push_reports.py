"""The time that the parts of a push take, as metrics."""

from types import SimpleNamespace
from typing import Any

import pytest

from core.weight_sync.push import SenderSettings, SendReport, WeightPush
from helpers.fake_cluster import ALLOCATION


class Side:
    """Trainer or generators: a call takes as long as `seconds` has it."""

    def __init__(self, clock: SimpleNamespace, seconds: dict[str, float], results: dict[str, Any]) -> None:
        self._clock, self._seconds, self._results = clock, seconds, results

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self._clock.seconds += self._seconds.get(method, 0.0)
            return self._results.get(method)

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(seconds=100.0)
    fake = SimpleNamespace(perf_counter=lambda: now.seconds, monotonic=lambda: now.seconds)
    monkeypatch.setattr("core.weight_sync.push.time", fake)
    return now


def make_push(kind: Any, trainer: Any, generators: Any, *, shares_gpus: bool = False) -> WeightPush:
    plan = SenderSettings(type=kind, dtype="float32", bucket_bytes=1, timeout_seconds=60.0)
    return WeightPush(
        trainer, generators, Side(SimpleNamespace(seconds=0.0), {}, {}), plan=plan, slots=ALLOCATION.trainer,
        shares_gpus=shares_gpus, verify="never", patience_seconds=1.0,
    )  # fmt: skip


def test_a_local_push_gathers_while_generators_sample_and_then_sends(clock: SimpleNamespace) -> None:
    trainer = Side(clock, {"export_weights": 2.0}, {"export_weights": ([], 3_000_000_000)})
    generators = Side(clock, {"receive": 5.0}, {"receive": [0.5, 1.5], "admit": 1, "participated": []})
    push = make_push("local", trainer, generators)
    assert push.push(1).metrics() == {
        "push/seconds": 7.0, "push/pause_seconds": 1.5, "push/gather_seconds": 2.0, "push/send_seconds": 5.0,
        "push/gigabytes": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "seconds"), [("nccl", 9.75), ("ipc", 19.75)])
def test_a_push_to_servers_reports_what_its_sender_and_the_generators_measured(kind, seconds, clock, caplog) -> None:
    caplog.set_level("INFO")
    sent = SendReport(seconds=3.5, num_bytes=1_000_000_000, num_buckets=2, changed=0.25)
    trainer = Side(clock, {"push_prepare": 2.0, "push_send": 4.0, "offload": 3.0}, {"push_send": sent})
    generators = Side(
        clock, {"pause": 0.75, "resume": 3.0, "resume_memory": 2.375},
        {"resume": [6.0, 5.0], "admit": 1, "participated": []},
    )  # fmt: skip
    push = make_push(kind, trainer, generators, shares_gpus=kind == "ipc")
    metrics = push.push(1).metrics()
    assert metrics == {
        "push/seconds": seconds, "push/pause_seconds": 6.0, "push/gather_seconds": 2.0, "push/send_seconds": 3.5,
        "push/gigabytes": 1.0, "push/changed_values": 0.25,
    }  # fmt: skip
    assert "1.00 GB in 2 buckets (the 25.00% of the values that have changed), sent in 3.500 s" in caplog.text
