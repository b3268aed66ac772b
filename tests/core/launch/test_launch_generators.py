"""Generators that are lost, and come back or do not, over actors that answer as a test says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from core.errors import LaunchError
from helpers.fake_cluster import PENDING, Actor, Cluster, Rollout, clock, make_pool, make_push
from rollout.inference.backend import BackendSettings

__all__ = ["clock"]  # a fixture


@pytest.mark.parametrize(
    ("num_generators", "phase"), [(1, "export"), *((n, "receive of the generators") for n in (1, 2))]
)
def test_a_generator_whose_death_is_noticed_while_weights_travel_costs_a_repeated_push_and_no_attempt(
    tmp_path: Path, clock: SimpleNamespace, num_generators: int, phase: str
) -> None:
    actors = [Actor() for _ in range(num_generators + 1)]
    cluster = Cluster(tmp_path, actors)
    pool, rollout = make_pool(cluster, num_generators), Rollout()
    push = make_push(cluster, pool, rollout)
    push.push(1)
    clock.seconds += 6.0
    pool.look()  # a health check is under way

    cluster.before_gather[phase] = actors[0].die
    assert push.push(2).longest_pause_seconds == 0.25
    pool.look()
    push.push(3)
    assert rollout.replaced == [0]  # the new process: in the repeated push where it is alone, else in the next


def test_the_pause_of_a_push_is_the_longest_of_any_generator(tmp_path: Path, clock: SimpleNamespace) -> None:
    cluster = Cluster(tmp_path, [Actor(receive=0.5), Actor(receive=2.0), Actor(receive=1.0)])
    push = make_push(cluster, make_pool(cluster, 3), Rollout())
    assert push.push(1).longest_pause_seconds == 2.0


def test_a_generator_that_the_router_gave_up_is_restarted_and_gets_the_version_of_the_others(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    cluster = Cluster(tmp_path, [Actor() for _ in range(3)])
    pool, rollout = make_pool(cluster, 2), Rollout()
    received: list[int] = []
    receive = pool.receive

    def recording(buckets: Any, version: int, timeout_seconds: float) -> list[float]:
        received.append(version)
        return receive(buckets, version, timeout_seconds)

    pool.receive = recording  # type: ignore[method-assign]
    push = make_push(cluster, pool, rollout)
    push.push(7)
    rollout.lost = {1: "three requests failed"}
    clock.seconds += 11.0
    push.sync_rejoined()
    assert "three requests failed" in pool.failures()
    rollout.lost = {}
    pool.look()
    push.sync_rejoined()
    assert received == [7, 7] and rollout.replaced == [1]


def test_with_no_generator_left_a_call_on_all_of_them_is_a_lost_generator_and_closing_is_nothing(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    pool = make_pool(Cluster(tmp_path, [Actor(), Actor(start=PENDING)]), 1)
    pool.lose(0, "no answer")
    with pytest.raises(LaunchError, match="receive of the generators: no generator is left; generator-0: no answer"):
        pool.receive([], 1, 60.0)
    pool.close()


def test_a_generator_that_never_gets_ready_again_is_given_up_in_time(tmp_path: Path, clock: SimpleNamespace) -> None:
    pool = make_pool(Cluster(tmp_path, [Actor(), *(Actor(start=PENDING) for _ in range(3))]), 1)
    pool.lose(0, "killed")
    for _ in range(3):
        pool.look()
        pool.raise_if_all_gone()
        clock.seconds += 61.0
        pool.look()
    with pytest.raises(LaunchError, match="not ready within launch.startup_timeout_seconds=60"):
        pool.raise_if_all_gone()


def test_a_generator_that_does_not_answer_a_health_check_in_time_is_restarted(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    pool = make_pool(Cluster(tmp_path, [Actor(health=PENDING), Actor()]), 1)
    clock.seconds += 6.0
    pool.look()  # a health check is sent
    clock.seconds += 20.0
    pool.look()
    assert pool.failures() == ""
    clock.seconds += 1.0
    pool.look()
    assert "no answer to a health check within generator.health_timeout_seconds=20" in pool.failures()
    pool.look()
    assert pool.waiting


def test_a_generator_that_ran_out_of_memory_restarts_with_half_as_many_requests(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, running = Cluster(tmp_path, [Actor() for _ in range(3)]), []
    start_actor = cluster.start_actor

    def start(*args: Any, **options: Any) -> Any:
        running.extend(given.max_running for given in args if isinstance(given, BackendSettings))
        return start_actor()

    monkeypatch.setattr(cluster, "start_actor", start)
    pool = make_pool(cluster, 1)
    pool.lose(0, "torch.OutOfMemoryError: CUDA out of memory")
    pool.look()
    pool.admit()
    pool.lose(0, "killed")
    assert running == [8, 4, 4]


def test_only_a_good_health_check_while_it_serves_makes_a_generator_start_anew_in_the_count(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    cluster = Cluster(tmp_path, [Actor() for _ in range(9)])
    pool, rollout = make_pool(cluster, 1), Rollout()
    push = make_push(cluster, pool, rollout)

    def serve(*, healthy: bool) -> None:
        """It gets weights, and dies at its first request or after a health check."""
        push.push(1)
        if healthy:
            clock.seconds += 6.0
            pool.look()
            pool.look()
        pool.lose(0, "died at its first request")

    serve(healthy=False)
    serve(healthy=False)
    serve(healthy=True)
    for _ in range(3):
        serve(healthy=False)
    with pytest.raises(LaunchError, match="no generator is left"):
        push.push(1)


def test_who_is_gone_while_the_pool_is_closed_is_not_started_again(clock: SimpleNamespace, tmp_path: Path) -> None:
    actor = Actor(close=None)
    cluster = Cluster(tmp_path, [actor])
    pool = make_pool(cluster, 1)
    clock.seconds += 10.0  # a health check is due

    def closed() -> None:
        actor.answers["health"] = RayActorError(error_msg="Session is closed")
        pool.look()  # asks; the next look gets the answer

    cluster.before_gather["close of the generators"] = closed
    pool.close()
    assert pool.failures() == ""


def test_a_push_waits_for_a_generator_to_restart_no_longer_than_the_patience(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    cluster = Cluster(tmp_path, [Actor(), Actor(start=PENDING)])
    cluster.startup_seconds = 300.0
    pool = make_pool(cluster, 1)
    push = make_push(cluster, pool, Rollout())
    push.push(1)
    pool.lose(0, "killed")
    began = clock.seconds
    with pytest.raises(LaunchError, match=r"within generator.patience_seconds=60: generator-0: killed"):
        push.push(2)
    assert clock.seconds - began == pytest.approx(60.0, abs=1.0)
