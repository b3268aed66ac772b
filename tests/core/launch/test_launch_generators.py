"""Generators that are lost, and come back or do not, over actors that answer as a test says."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.errors import LaunchError
from helpers.fake_cluster import ALLOCATION, PENDING, Actor, Cluster, clock, make_pool, make_run
from rollout.inference.backend import BackendSettings

__all__ = ["clock"]  # a fixture


@pytest.mark.parametrize(
    ("num_generators", "phase"), [(1, "export"), *((n, "receive of the generators") for n in (1, 2))]
)
def test_a_generator_whose_death_is_noticed_while_weights_travel_costs_a_repeated_push_and_no_attempt(
    tmp_path: Path, clock: SimpleNamespace, num_generators: int, phase: str
) -> None:
    actors = [Actor() for _ in range(num_generators + 1)]
    cluster, pool, rollout, push = make_run(tmp_path, actors, num_generators)
    push.push(1)
    cluster.before_gather[phase] = actors[0].die
    assert push.push(2).longest_pause_seconds == 0.25
    pool.look()
    push.push(3)
    assert rollout.replaced == ["generator-0"]  # in the repeated push where it is alone


def test_the_pause_of_a_push_is_the_longest_of_any_generator(tmp_path: Path, clock: SimpleNamespace) -> None:
    *_, push = make_run(tmp_path, [Actor(receive=0.5), Actor(receive=2.0), Actor(receive=1.0)], 3)
    assert push.push(1).longest_pause_seconds == 2.0


def test_a_generator_that_the_router_gave_up_is_restarted_and_gets_the_version_of_the_others(tmp_path, clock) -> None:
    _, pool, rollout, push = make_run(tmp_path, [Actor() for _ in range(3)], 2)
    received: list[int] = []
    receive = pool.receive

    def recording(buckets: Any, version: int, timeout_seconds: float) -> list[float]:
        received.append(version)
        return receive(buckets, version, timeout_seconds)

    pool.receive = recording  # type: ignore[method-assign]
    push.push(7)
    rollout.lost = {"generator-1": "three requests failed"}
    pool.look()
    assert "three requests failed" in pool.failures()
    pool.look()
    push.sync_rejoined()
    assert received == [7, 7] and rollout.replaced == ["generator-1"]


def test_with_no_generator_left_a_call_on_all_of_them_is_a_lost_generator_and_closing_is_nothing(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    pool = make_pool(Cluster(tmp_path, [Actor(), Actor(start=PENDING)]), 1)
    pool.lose("generator-0", "no answer")
    with pytest.raises(LaunchError, match="receive of the generators: no generator is left; generator-0: no answer"):
        pool.receive([], 1, 60.0)
    pool.close()


def test_a_generator_that_never_gets_ready_again_is_given_up_in_time(tmp_path: Path, clock: SimpleNamespace) -> None:
    pool = make_pool(Cluster(tmp_path, [Actor(), *(Actor(start=PENDING) for _ in range(3))]), 1)
    pool.lose("generator-0", "killed")
    for _ in range(3):
        pool.look()
        pool.raise_if_all_gone()
        clock.seconds += 61.0
        pool.look()
    with pytest.raises(LaunchError, match="not ready within launch.startup_timeout_seconds=60"):
        pool.raise_if_all_gone()


def test_a_loss_is_reported_once_and_the_generator_that_came_back_is_kept(tmp_path, clock: SimpleNamespace) -> None:
    _, pool, rollout, push = make_run(tmp_path, [Actor() for _ in range(4)], 2)
    push.push(1)
    for _ in range(2):
        rollout.lost = {"generator-1": "three requests failed"}
        for _ in range(3):
            pool.look()  # the rollout side has lost it until it is replaced
        assert pool.waiting
        push.sync_rejoined()
        pool.look()
        assert not pool.waiting and len(pool.endpoints(ALLOCATION.trainer)) == 2
    assert rollout.replaced == ["generator-1"] * 2


def test_a_generator_that_dies_in_its_first_push_is_restarted_before_the_rollout_side_knows_it(tmp_path, clock) -> None:
    actors = [Actor() for _ in range(4)]
    cluster, pool, rollout, push = make_run(tmp_path, actors, 2)
    push.push(1)
    rollout.lost = {"generator-1": "killed"}
    pool.look()
    pool.look()
    cluster.before_gather["receive of the generators"] = actors[2].die
    push.sync_rejoined()
    assert rollout.replaced == [] and "killed" in pool.failures()
    pool.look()
    push.sync_rejoined()
    assert rollout.replaced == ["generator-1"]


def test_a_generator_that_cannot_be_restarted_ends_the_attempt(tmp_path: Path, clock: SimpleNamespace) -> None:
    _, pool, rollout, push = make_run(tmp_path, [Actor() for _ in range(2)], 2, restarts=False)
    push.push(1)
    rollout.lost = {"generator-1": "three requests failed"}
    pool.look()
    with pytest.raises(LaunchError, match=r"^generator-1 failed: three requests failed$"):
        push.sync_rejoined()


def test_a_generator_that_ran_out_of_memory_restarts_with_half_as_many_requests(tmp_path, clock, monkeypatch) -> None:
    cluster, running = Cluster(tmp_path, [Actor() for _ in range(3)]), []
    start_actor = cluster.start_actor

    def start(*args: Any, **options: Any) -> Any:
        running.extend(given.config.max_running for given in args if isinstance(given, BackendSettings))
        return start_actor()

    monkeypatch.setattr(cluster, "start_actor", start)
    pool = make_pool(cluster, 1)
    pool.lose("generator-0", "torch.OutOfMemoryError: CUDA out of memory")
    pool.look()
    pool.admit()
    pool.joined("generator-0")
    pool.lose("generator-0", "killed")
    assert running == [8, 4, 4]


def test_a_push_waits_for_a_generator_to_restart_no_longer_than_the_patience(tmp_path, clock: SimpleNamespace) -> None:
    cluster, pool, _, push = make_run(tmp_path, [Actor(), Actor(start=PENDING)], 1)
    cluster.startup_seconds = 300.0
    push.push(1)
    pool.lose("generator-0", "killed")
    began = clock.seconds
    with pytest.raises(LaunchError, match=r"within generator.patience_seconds=60: generator-0: killed"):
        push.push(2)
    assert clock.seconds - began == pytest.approx(60.0, abs=1.0)


def test_a_second_push_that_reaches_a_generator_starts_the_count_of_its_restarts_anew(tmp_path, clock) -> None:
    _, pool, _, push = make_run(tmp_path, [Actor() for _ in range(9)], 1)

    def serve(pushes: int) -> None:
        for _ in range(pushes):
            push.push(1)
        pool.lose("generator-0", "died at its first request")

    serve(1)
    serve(1)
    serve(2)
    for _ in range(3):
        serve(1)
    with pytest.raises(LaunchError, match="no generator is left"):
        push.push(1)
