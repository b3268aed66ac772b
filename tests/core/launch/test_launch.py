"""What the driver makes of a worker's failure: another attempt, or the end with the worker's own words."""

import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import ObjectStoreFullError, RayTaskError

from allocation import parse
from core.config.runtime import DeadlineConfig
from core.errors import LaunchError
from core.experiments.workers import threads_per_process
from core.launch import cluster as launch_cluster
from core.launch import remote as launch_wait
from core.launch.cluster import Cluster
from core.launch.remote import Waiter, as_driver_sees
from core.monitoring.logs import LineFormatter
from core.processes.signals import Interrupts
from core.weight_sync.push import PushError
from rollout.errors import GeneratorCallError, GeneratorGone, GeneratorStartError
from rollout.inference.router import NoGeneratorError

NEW_PROCESSES_MAY_HELP = [NoGeneratorError, PushError, GeneratorCallError, GeneratorGone, GeneratorStartError]


@pytest.mark.parametrize("kind", NEW_PROCESSES_MAY_HELP)
def test_a_lost_server_or_push_costs_an_attempt_as_a_lost_worker_does(kind: type[Exception]) -> None:
    seen = as_driver_sees(RayTaskError("push_send", "", kind("generator-1: no answer")), worker="trainer-rank0")
    assert isinstance(seen, LaunchError)
    assert str(seen).endswith("generator-1: no answer")


def test_bad_input_stays_what_it_is_with_the_name_of_the_worker() -> None:
    bad = ValueError("max_tokens_per_mb=8")
    seen = as_driver_sees(RayTaskError("train_step", "line 7", bad), worker="trainer-rank3")
    assert isinstance(seen, ValueError) and str(seen) == "max_tokens_per_mb=8"
    assert any("in trainer-rank3" in note for note in seen.__notes__)


def test_processes_divide_the_cores_that_this_one_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    allocation = parse("embedded.d1m1p1+d1m1p1", n_nodes=1, n_gpus_per_node=2)
    assert threads_per_process(allocation, configured=0, takes_turns=False, gpus=False) == 4
    assert threads_per_process(allocation, configured=3, takes_turns=False, gpus=False) == 3


def test_processes_that_compute_on_gpus_take_a_few_cores_unless_more_are_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    allocation = parse("sglang.d1m1p1+d1m1p1", n_nodes=1, n_gpus_per_node=2)
    assert threads_per_process(allocation, configured=0, takes_turns=True, gpus=False) == 64
    assert threads_per_process(allocation, configured=0, takes_turns=True, gpus=True) == 8
    assert threads_per_process(allocation, configured=16, takes_turns=True, gpus=True) == 16
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert threads_per_process(allocation, configured=0, takes_turns=False, gpus=True) == 4


def test_an_error_of_rays_own_is_a_lost_attempt_and_no_traceback() -> None:
    full = RayTaskError("export_weights", "", ObjectStoreFullError("no room for 3 GiB"))
    nested = RayTaskError("take", "", RayTaskError("drain", "", ValueError("bad row")))
    seen = as_driver_sees(full, worker="trainer-rank0")
    assert isinstance(seen, LaunchError) and "trainer-rank0: ObjectStoreFullError: no room" in str(seen)
    assert str(as_driver_sees(nested, worker="rollout")) == "bad row"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster without Ray, to leave."""
    made = Cluster(
        joined=None, envs={}, num_actors=1, startup_timeout_seconds=1.0, deadlines=DeadlineConfig(), log_folder=tmp_path
    )
    made._interrupts = Interrupts()
    made._interrupts.__enter__()
    monkeypatch.setattr(made, "_end", lambda: None)
    return made


def test_leaving_the_cluster_shows_what_workers_warned_of_in_the_last_second(cluster: Cluster, caplog) -> None:
    record = logging.LogRecord("rollout", logging.WARNING, __file__, 1, "step 7: 80 of 128 could not", None, None)
    (cluster.log_folder / "rollout.log").write_text(LineFormatter("rollout").format(record) + "\n")
    with caplog.at_level(logging.WARNING):
        cluster.__exit__(None, None, None)
    assert [r.getMessage() for r in caplog.records] == ["rollout: step 7: 80 of 128 could not"]


def test_sigterm_while_ray_starts_is_an_interrupt_and_ends_the_watchdog(tmp_path, monkeypatch) -> None:
    ended = []

    def start_own(*common: object, **options: object) -> None:
        raise SystemExit(signal.SIGTERM)  # Ray's own handler

    fakes = {"ray": SimpleNamespace(shutdown=lambda: ended.append("ray")), "start_own": start_own}
    fakes["start_watchdog"] = lambda names: SimpleNamespace(end=lambda: ended.append("watchdog"))
    for name, fake in fakes.items():
        monkeypatch.setattr(launch_cluster, name, fake)
    before = signal.getsignal(signal.SIGTERM)
    cluster = Cluster(
        joined=None, envs={}, num_actors=1, startup_timeout_seconds=1.0, deadlines=DeadlineConfig(),
        log_folder=tmp_path, before_end=[lambda: ended.append("tracker")],
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt), cluster:
        pass
    assert ended == ["tracker", "ray", "watchdog"], (
        "what has processes ends before they are killed" and signal.getsignal(signal.SIGTERM) == before
    )


def test_results_are_in_the_order_of_the_calls_whichever_comes_first(tmp_path, monkeypatch) -> None:
    def wait(pending: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        return pending[-1:], pending[:-1]  # the last one first

    monkeypatch.setattr(launch_wait, "ray", SimpleNamespace(wait=wait, get=str.upper))
    results = Waiter(tmp_path).gather(
        ["a", "b", "c"], names=["rank0", "rank1", "rank2"], phase="train_step", timeout_seconds=60.0, key="deadlines.x"
    )
    assert results == ["A", "B", "C"]


def test_a_call_beside_others_need_not_end_but_its_failure_ends_the_wait(tmp_path, monkeypatch) -> None:
    ended = {"take"}

    def wait(pending: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        ready = [ref for ref in pending if ref in ended][:1]
        return ready, [ref for ref in pending if ref not in ready]

    def get(ref: str) -> str:
        if ref == "fails":
            raise RayTaskError("set_version", "", ValueError("version 3"))
        return ref

    monkeypatch.setattr(launch_wait, "ray", SimpleNamespace(wait=wait, get=get))

    def take(beside: list[str]) -> list[str]:
        return Waiter(tmp_path).gather(
            ["take"], names=["rollout"], phase="take", timeout_seconds=60.0, key="x", beside=beside
        )

    running = ["set_version"]
    assert take(running) == ["take"] and running == ["set_version"]
    ended.add("set_version")
    assert take(running) == ["take"] and running == []
    ended.add("fails")
    with pytest.raises(ValueError, match="version 3") as raised:
        take(["fails"])
    assert any("in rollout" in note for note in raised.value.__notes__)


def test_a_worker_that_does_not_answer_in_time_is_named_with_its_state_and_the_key(tmp_path, monkeypatch) -> None:
    def wait(pending: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        return [ref for ref in pending if ref == "a"], [ref for ref in pending if ref != "a"]

    monkeypatch.setattr(launch_wait, "ray", SimpleNamespace(wait=wait, get=str.upper))
    (tmp_path / "stacks").mkdir()
    waiter = Waiter(tmp_path)
    waiter.ask_nodes = lambda why: {"rank1": "stopped"}
    said = (
        r"train_step: no answer within deadlines.call_seconds=0.05 from rank1 \(stopped\). All stacks are in .*stacks$"
    )
    with pytest.raises(LaunchError, match=said):
        waiter.gather(
            ["a", "b"], names=["rank0", "rank1"], phase="train_step", timeout_seconds=0.05, key="deadlines.call_seconds"
        )
    assert "no answer in train_step" in (tmp_path / "stacks" / "driver.txt").read_text()
