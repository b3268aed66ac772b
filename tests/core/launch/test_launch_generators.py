"""Generators that are lost, and come back or do not, over actors that answer as a test says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from allocation import parse
from core.errors import LaunchError
from core.launch import generators as launch_generators
from core.launch.generators import GeneratorPool, HealthSettings
from core.recovery.memory import MemoryLimits
from core.weight_sync.base import LocalPush
from core.weight_sync.fault_tolerant import FaultTolerantWeightSync
from rollout.inference.backend import BackendSettings

PENDING = object()


class Ref:
    """A call on an actor; whoever asks gets what the actor says by then, which is nothing good once it is dead."""

    def __init__(self, actor: Actor, method: str) -> None:
        self._actor, self._method = actor, method

    @property
    def result(self) -> Any:
        return self._actor.answers[self._method]


class Actor:
    """`answers`: result of each method; an exception is raised by whoever gets it."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {"start": None, "health": None, "receive": 0.25, **answers}

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: Ref(self, method))

    def die(self) -> None:
        self.answers = dict.fromkeys(self.answers, RayActorError(error_msg="killed"))


class FakeRay:
    def wait(self, refs: list[Ref], **options: Any) -> tuple[list[Ref], list[Ref]]:
        return [r for r in refs if r.result is not PENDING], [r for r in refs if r.result is PENDING]

    def get(self, ref: Ref) -> Any:
        if isinstance(ref.result, Exception):
            raise ref.result
        return ref.result

    def kill(self, actor: Actor, **options: Any) -> None:
        actor.die()


class Cluster:
    """Hands out `actors` in order; does the chores before it gathers, as the real one does while it waits."""

    startup_seconds = 60.0
    host = "127.0.0.1"

    def __init__(self, log_folder: Path, actors: list[Actor]) -> None:
        self.log_folder, self.actors = log_folder, iter(actors)
        self.waiter = self
        self.before_gather: dict[str, Callable[[], None]] = {}
        self._chores: list[Callable[[], None]] = []

    def start_actor(self, *args: Any, **options: Any) -> Actor:
        return next(self.actors)

    def gather_started(self, refs: list[Ref], **options: Any) -> None: ...

    def every_second(self, chore: Callable[[], None]) -> None:
        self._chores.append(chore)

    def gather(self, refs: list[Ref], *, phase: str, **options: Any) -> list[Any]:
        self.before_gather.pop(phase, lambda: None)()
        for chore in self._chores:
            chore()
        failures = [r.result for r in refs if isinstance(r.result, Exception)]
        if failures:
            raise LaunchError(f"{phase}: {failures[0]}")
        return [r.result for r in refs]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds, which pass when somebody sleeps."""
    now = SimpleNamespace(seconds=1000.0)

    def sleep(seconds: float) -> None:
        now.seconds += seconds

    fake = SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep)
    monkeypatch.setattr(launch_generators, "time", fake)
    monkeypatch.setattr("core.weight_sync.fault_tolerant.time", fake)
    monkeypatch.setattr(launch_generators, "ray", FakeRay())
    return now


def make_pool(cluster: Cluster, num_generators: int) -> GeneratorPool:
    allocation = parse(
        f"mock.d{num_generators}m1p1+d1m1p1",
        n_nodes=1,
        n_gpus_per_node=num_generators + 1,
        default_backend="mock",
    )
    pool = GeneratorPool(
        cluster,  # type: ignore[arg-type]
        allocation.generator,
        BackendSettings(model_path="", dtype="float32", device="cpu", max_running=8),
        threads=1,
        health=HealthSettings(interval_seconds=5.0, timeout_seconds=20.0, restarts=True),
        memory=MemoryLimits(),
    )
    pool.wait_started(60.0)
    return pool


class Trainer:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def export_weights(self, *args: Any) -> tuple[list[Any], int]:
        self._cluster.gather([], phase="export")
        return [], 0


class Rollout:
    """The rollout side, which knows of who came back."""

    def __init__(self) -> None:
        self.replaced: list[int] = []
        self.lost: dict[int, str] = {}

    def replace_generator(self, index: int, actor: Any) -> None:
        self.replaced.append(index)

    def lost_generators(self) -> dict[int, str]:
        return self.lost


def make_push(cluster: Cluster, pool: GeneratorPool, rollout: Rollout) -> FaultTolerantWeightSync:
    local = LocalPush(Trainer(cluster), pool, bucket_bytes=1, timeout_seconds=60.0)  # type: ignore[arg-type]
    return FaultTolerantWeightSync(local, pool, rollout, reconnect=lambda: None, patience_seconds=60.0)  # type: ignore[arg-type]


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
